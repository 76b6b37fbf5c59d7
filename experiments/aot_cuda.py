"""Compiles jax programs for an NVIDIA GPU that is not there, and reads what the compiler says of their Pallas kernels.

Needs the CUDA plugin of jax and ptxas of CUDA 13, no GPU and no driver. With cuobjdump and nvdisasm the machine code is
read too. The extra `aot` has all of them; tools on PATH go before those of the wheels.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import site
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from penelope_jax.errors import InputError
from penelope_jax.experiments.aot_programs import large_copies

# Name: bytes a second, bytes of memory, kind. Otherwise the two are the same chip.
_DEVICES = {
    "h100": (3_352_320_000_000, 84_942_979_072, "NVIDIA H100 80GB HBM3"),
    "h200": (4_800_000_000_000, 151_397_597_184, "NVIDIA H200 141GB HBM3e"),
}
DEVICES = tuple(_DEVICES)

# Instructions that tell how a kernel works, as ptxas names them, and as patterns of the machine code.
_IN_PTX = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "tma_load": r"\bcp\.async\.bulk\.tensor\.\dd\.shared::(?:cta|cluster)\.global\b",
    "tma_store": r"\bcp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\b",
}
_IN_SASS = {"wgmma": r"\bHGMMA\b", "tma_load": r"\bUTMALDG\b", "tma_store": r"\bUTMASTG\b", "local": r"\b(?:LDL|STL)\b"}
# From where all but the last of the products in flight have ended to where that has too.
_BESIDE_WGMMA = r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b"


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel.

    Attributes:
        name: of the kernel.
        registers: of a thread at launch.
        worker_registers: what a computing warpgroup raises that to; 0: it does not.
        threads: of a CUDA block.
        spill_bytes: stores to and loads from local memory.
        shared_memory_bytes: of a CUDA block.
        remarks: what ptxas remarks on performance.
        ptx: how often the instructions of interest stand in the PTX.
        sass: the same in the machine code; `exp_beside_wgmma` is how many exponentials stand where a product is still
            running, at the place with the fewest. None without a disassembler.
    """

    name: str
    registers: int
    worker_registers: int
    threads: int
    spill_bytes: int
    shared_memory_bytes: int
    remarks: tuple[str, ...]
    ptx: dict[str, int]
    sass: dict[str, int] | None


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One jitted program: bytes on a device, what of 1 MiB or more is copied there, and its Pallas kernels."""

    name: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    large_copies: tuple[str, ...]
    kernels: tuple[KernelReport, ...]


def absent_mesh(device: str, shape: Sequence[int], axes: Sequence[str]) -> Mesh:
    """Returns a mesh of GPUs of one host that is not there.

    Raises:
        InputError: the compiler for them is not installed.
    """
    if _tool("ptxas") is None:
        raise InputError("ptxas is not on PATH; it comes with the CUDA 13 toolkit and with the wheel nvidia-cuda-nvcc.")
    num_devices = int(np.prod(shape))
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=_target_config(device)
        )
    except (RuntimeError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise InputError(
            f"This jax cannot compile for CUDA; install jax-cuda13-plugin=={jax.__version__}. It says: {error}"
        ) from error
    return Mesh(np.array(topology.devices).reshape(tuple(shape)), tuple(axes))


def compile_program(name: str, function: Callable, arguments: Sequence[Any], mesh: Mesh, **jit: Any) -> ProgramReport:
    """Compiles a function for the devices of a mesh.

    Args:
        name: of the program, for the report.
        function: to jit.
        arguments: trees of `jax.ShapeDtypeStruct`s with shardings over the mesh.
        mesh: of absent devices.
        **jit: options of `jax.jit`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _mosaic_dump(folder), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(function, **jit).lower(*arguments).compile()
        kernels = _read_kernels(pathlib.Path(folder))
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"{name}: the compiler gives no memory analysis.")
    return ProgramReport(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        large_copies=large_copies(compiled.as_text() or ""),
        kernels=kernels,
    )


def ptxas_version() -> str | None:
    """Returns the version of the ptxas that is used, None where there is none."""
    if _tool("ptxas") is None:
        return None
    found = re.search(r"\bV([\d.]+)", _run("ptxas", "--version"))
    return found.group(1) if found else "unknown"


@contextlib.contextmanager
def _mosaic_dump(folder: str) -> Iterator[None]:
    """Makes Mosaic GPU write the PTX of each kernel that is compiled meanwhile."""
    settings = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_known_kernels: dict[str, KernelReport] = {}  # by the text that Mosaic GPU starts from


def _read_kernels(folder: pathlib.Path) -> tuple[KernelReport, ...]:
    """Reads what was dumped.

    A kernel that this process has compiled before is not compiled, or dumped, again. The texts that Mosaic GPU starts
    from and the PTX are numbered apart, and in different orders: the name and the number of threads tell which belong
    together.
    """

    def in_order(ending: str) -> list[tuple[str, pathlib.Path]]:
        stems = [(path.name.removesuffix(ending), path) for path in folder.glob(f"*{ending}")]
        return sorted(stems, key=lambda pair: int(pair[0].rpartition("_")[2]))

    codes, kernels = in_order(".ptx"), []
    for stem, path in in_order(".before_layout_inference.txt"):
        name, text = stem.rpartition("_")[0], path.read_text(encoding="utf-8").replace(stem, "")
        if text not in _known_kernels:
            threads = _first_number(r"gpu\.launch .* threads\(.*?\) in \(%\w+ = %c(\d+),", text)
            fitting = [
                (code, path)
                for code, path in codes
                if code.rpartition("_")[0] == name
                and _first_number(r"\.maxntid (\d+)", path.read_text(encoding="utf-8")) == threads
            ]
            if len(fitting) != 1:
                raise RuntimeError(f"{len(fitting)} kernels of {threads} threads are called {name}; expected 1.")
            codes.remove(fitting[0])
            _known_kernels[text] = _read_kernel(name, fitting[0][1], text)
        kernels.append(_known_kernels[text])
    if codes:
        raise RuntimeError(f"The PTX {codes[0][0]} belongs to no kernel.")
    return tuple(kernels)


def _read_kernel(name: str, path: pathlib.Path, launch: str) -> KernelReport:
    """Assembles the PTX of one kernel, as jax does, and reads what ptxas says."""
    text = path.read_text(encoding="utf-8")
    cubin = path.with_suffix(".cubin")
    said = _run("ptxas", "-v", "-arch=sm_90a", str(path), "-o", str(cubin))
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return KernelReport(
        name=name,
        registers=_first_number(r"Used (\d+) registers", said),
        worker_registers=_first_number(r"setmaxnreg\.inc\S* (\d+);", text, 0),
        threads=_first_number(r"\.maxntid (\d+)", text),
        spill_bytes=sum(map(int, spills)),
        shared_memory_bytes=_first_number(r"dynamic_shared_memory_size %c(\d+)_i32", launch),
        remarks=tuple(re.findall(r"\(C\d+\) (.*?)(?: in the function .*)?$", said, re.MULTILINE)),
        ptx={name: len(re.findall(pattern, text)) for name, pattern in _IN_PTX.items()},
        sass=_count_instructions(cubin),
    )


def _count_instructions(cubin: pathlib.Path) -> dict[str, int] | None:
    if _tool("cuobjdump") is None or _tool("nvdisasm") is None:
        return None
    code = _run("cuobjdump", "-sass", str(cubin))
    counts = {name: len(re.findall(pattern, code)) for name, pattern in _IN_SASS.items()}
    beside = [len(re.findall(r"\bMUFU\.EX2\b", part)) for part in re.findall(_BESIDE_WGMMA, code, re.DOTALL)]
    return counts | {"exp_beside_wgmma": min(beside, default=0)}


def _first_number(pattern: str, text: str, default: int | None = None) -> int:
    found = re.search(pattern, text)
    if found:
        return int(found.group(1))
    if default is None:
        raise RuntimeError(f"The compiler's output has nothing like {pattern!r}.")
    return default


def _path() -> str:
    # Wheels of CUDA tools do not put them on PATH.
    folders = [str(pathlib.Path(folder, "nvidia", "cu13", "bin")) for folder in site.getsitepackages()]
    return os.pathsep.join([os.environ.get("PATH", ""), *folders])


def _tool(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _run(name: str, *arguments: str) -> str:
    command = [_tool(name) or name, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"{name} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr


def _target_config(device: str) -> str:
    """Returns what XLA wants to know of the hardware."""
    bandwidth, memory, kind = _DEVICES[device]
    return f"""
        gpu_device_info {{
          name: "{kind}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
          cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 device_address_bits: 64
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
          l2_cache_size: 52428800 memory_bandwidth: {bandwidth} device_memory_size: {memory}
          driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
          dnn_version: "9.10.0" device_interconnect_info {{ active_links: 18 }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{kind}"
        """
