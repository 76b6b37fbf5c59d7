"""Compiles jax programs for TPUs that are not there, and reads what the compiler says of their Pallas kernels.

Needs libtpu in the version that this jax wants (`pip install 'jax[tpu]'`), and no TPU. What a kernel uses stands in the
compiler's dumps; a libtpu that no longer writes them leaves those numbers out.
"""

import dataclasses
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh

from penelope_jax.errors import InputError
from penelope_jax.experiments.aot_programs import large_copies

# Name of a generation: how many axes its networks have, and devices of a chip. The two cores of a v5p are one device.
_GENERATIONS = {"v5e": (2, 1), "v5p": (3, 1), "v6e": (2, 1), "tpu7x": (3, 2)}
GENERATIONS = tuple(_GENERATIONS)

# They keep libtpu from asking a cloud what machine this is.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_DUMPED = "^(post-ra|final_hlo-static-per-bundle-utilization)$"


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel.

    Attributes:
        name: of the kernel.
        vmem_limit_bytes: what it may use of the vector memory, as it asked or by default.
        vmem_bytes: what it uses: windows, scratch, and what registers spill to. None here and below: not dumped.
        smem_bytes: of the scalar memory, windows and scratch; prefetched scalars come on top.
        bundles: instructions; each does several things at once.
        spill_stores: stores of vector registers, that ran short.
        mxu_bundles: instructions that use the matrix units.
    """

    name: str
    vmem_limit_bytes: int
    vmem_bytes: int | None
    smem_bytes: int | None
    bundles: int | None
    spill_stores: int | None
    mxu_bundles: int | None


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


def absent_mesh(generation: str, shape: Sequence[int], names: Sequence[str], topology: str | None = None) -> Mesh:
    """Returns a mesh of the first devices of a slice that is not there.

    Args:
        generation: one of `GENERATIONS`.
        shape: of the mesh.
        names: of its axes.
        topology: chips along each axis of the slice, as in "4x4x4"; by default the smallest that is large enough.

    Raises:
        InputError: the compiler for them is not installed, or the slice does not exist or is too small.
    """
    num_devices = math.prod(shape)
    if topology is None:
        topology = _smallest_topology(generation, num_devices)
    _start_dumps()
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{topology}").devices
    except (RuntimeError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise InputError(
            f"This jax cannot compile for {generation}:{topology}; install jax[tpu]=={jax.__version__}. It says: {error}"
        ) from error
    if len(devices) < num_devices:
        raise InputError(f"{generation}:{topology} has {len(devices)} devices; the mesh {tuple(shape)} needs more.")
    devices = devices[:num_devices]
    if num_devices > 1:
        ordered = mesh_utils.create_device_mesh(tuple(shape), devices, allow_split_physical_axes=True)
        return Mesh(ordered, tuple(names))
    return Mesh(np.array(devices).reshape(tuple(shape)), tuple(names))


def compile_program(name: str, function: Callable, arguments: Sequence[Any], mesh: Mesh, **jit: Any) -> ProgramReport:
    """Compiles a function for the devices of a mesh.

    Args:
        name: of the program, for the report.
        function: to jit.
        arguments: trees of `jax.ShapeDtypeStruct`s with shardings over the mesh, or static values.
        mesh: of absent devices.
        **jit: options of `jax.jit`.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function, **jit).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"{name}: the compiler gives no memory analysis.")
    dumps, text = _take_dumps(), compiled.as_text() or ""
    return ProgramReport(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        large_copies=large_copies(text),
        kernels=tuple(_read_kernel(call, dumps) for call in _kernel_calls(text)),
    )


def _smallest_topology(generation: str, num_devices: int) -> str:
    """Returns the chips along each axis of the smallest slice with that many devices, each a power of two."""
    num_axes, devices_per_chip = _GENERATIONS[generation]
    axes = [1] * num_axes
    while math.prod(axes) * devices_per_chip < num_devices:
        axes[axes.index(min(axes))] *= 2
    # The longest is the last, but slices of one host are 2x2x1.
    axes.sort(reverse=math.prod(axes) < 2**num_axes)
    return "x".join(map(str, axes))


_dump_folder: tempfile.TemporaryDirectory | None = None  # libtpu reads its options once, when it is loaded


def _start_dumps() -> None:
    global _dump_folder
    if _dump_folder is None:
        _dump_folder = tempfile.TemporaryDirectory()
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        options = f"--xla_jf_dump_to={_dump_folder.name} --xla_jf_dump_llo_pass_label_regex={_DUMPED}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {options}".strip()


def _take_dumps() -> dict[str, str]:
    """Returns what has been dumped since the last call, by the file's name without the time it starts with."""
    if _dump_folder is None:
        return {}
    dumps = {}
    for path in sorted(pathlib.Path(_dump_folder.name).iterdir()):
        if path.name.endswith("-post-ra.txt") or path.name.endswith("-utilization.txt"):
            dumps[path.name.partition("-")[2]] = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
    return dumps


def _kernel_calls(program: str) -> list[tuple[str, str]]:
    """Returns name and text of each call of a Pallas kernel in a compiled program."""
    lines = [line for line in program.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return [(line.strip().removeprefix("ROOT ").partition(" ")[0].removeprefix("%"), line) for line in lines]


def _read_kernel(call: tuple[str, str], dumps: dict[str, str]) -> KernelReport:
    name, text = call
    limit = re.search(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', text)
    used: dict[str, int] = {}
    for file, dump in dumps.items():
        if re.fullmatch(re.escape(name) + r"-\d+-post-ra\.txt", file):
            allocated = re.findall(r"#allocation\d+ \[.*?space=(\w+), size = (0x[0-9a-f]+).*? scoped", dump)
            for space in ("vmem", "smem"):
                used[f"{space}_bytes"] = sum(int(size, 16) for place, size in allocated if place == space)
        elif re.fullmatch(re.escape(name) + r"-\d+-final_hlo-static-per-bundle-utilization\.txt", file):
            columns = _columns(dump)
            used["bundles"] = len(columns["MXU"])
            used["spill_stores"] = sum(columns["VSTORE:SPILL"])
            used["mxu_bundles"] = sum(units > 0 for units in columns["MXU"])
    return KernelReport(
        name=name,
        vmem_limit_bytes=int(limit.group(1)) if limit else 0,
        vmem_bytes=used.get("vmem_bytes"),
        smem_bytes=used.get("smem_bytes"),
        bundles=used.get("bundles"),
        spill_stores=used.get("spill_stores"),
        mxu_bundles=used.get("mxu_bundles"),
    )


def _columns(dump: str) -> dict[str, list[int]]:
    """Reads the table of what each instruction uses."""
    capacity, _, utilization = dump.partition("== UTILIZATION:")
    names = [name.strip() for name in capacity.splitlines()[1].split(",")]
    rows = [[int(number) for number in line.split()] for line in utilization.splitlines() if line.strip()]
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}
