"""Compiles whole programs for slices of accelerators that are not there: bytes of a device, and what is in place."""

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from penelope_jax.experiments import aot_cuda, aot_tpu
from penelope_jax.experiments.aot_copies import abstract_pool, copy_programs
from penelope_jax.experiments.aot_hopper import kernels_missed
from penelope_jax.experiments.aot_models import (
    DECODE_ROWS,
    GPU_DEPLOYMENTS,
    MAX_SEGMENTS,
    MEMORY,
    PREFILL_ROWS,
    TPU_DEPLOYMENTS,
    Deployment,
    step_program,
)
from penelope_jax.experiments.aot_programs import Program, memory_missed, shard_bytes, total_bytes
from penelope_jax.models.layers import MESH_AXES

# Qwen3-8B's pages on one device and spread over as many as there are kv heads, or fewer: generation, devices.
GPU_COPIES = (("h100", 1), ("h200", 8))
TPU_COPIES = (("v5e", 1), ("v5e", 8), ("v5p", 4), ("v6e", 8), ("tpu7x", 2))
_COPIED_POOL = (1024, 36, 2, 8, 64, 128)
_COPIED_ROWS = 2048


@dataclasses.dataclass(frozen=True)
class PlacedProgram:
    """One program on its devices.

    Attributes:
        device: generation.
        mesh: devices along `data` and `tensor`.
        pool_tokens: of the KV pool.
        pool_bytes: of a device's part of it.
        total_bytes: what the program needs of a device's memory.
        memory_bytes: what a program can use of that.
        in_place: whether the pool is not copied.
        program: what the compiler says.
    """

    device: str
    mesh: tuple[int, int]
    pool_tokens: int
    pool_bytes: int
    total_bytes: int
    memory_bytes: int
    in_place: bool
    program: aot_cuda.ProgramReport | aot_tpu.ProgramReport


Reports = Iterator[tuple[PlacedProgram | None, list[str]]]  # each with what misses a bar; None: it does not compile


def compile_gpu_copies(devices: Container[str]) -> Reports:
    """Compiles writes and page copies for GPUs."""
    return _compile_copies(aot_cuda, devices, GPU_COPIES)


def compile_tpu_copies(devices: Container[str]) -> Reports:
    """Compiles writes and page copies for TPUs."""
    return _compile_copies(aot_tpu, devices, TPU_COPIES)


def compile_gpu_steps(devices: Container[str]) -> Reports:
    """Compiles the step of models for GPUs."""
    return _compile_steps(aot_cuda, devices, GPU_DEPLOYMENTS, kernels_missed)


def compile_tpu_steps(devices: Container[str]) -> Reports:
    """Compiles the step of models for TPUs."""
    return _compile_steps(aot_tpu, devices, TPU_DEPLOYMENTS, _tpu_kernels_missed)


def _compile_copies(compiler: Any, devices: Container[str], places: Iterable[tuple[str, int]]) -> Reports:
    for device, num_devices in places:
        if device not in devices:
            continue
        mesh = compiler.absent_mesh(device, (1, num_devices), MESH_AXES)
        pool = abstract_pool(_COPIED_POOL, "bfloat16", mesh)
        for program in copy_programs(pool, _COPIED_ROWS, MAX_SEGMENTS):
            yield _compile(compiler, device, mesh, program, lambda report: [])


def _compile_steps(
    compiler: Any, devices: Container[str], deployments: Iterable[Deployment], find_missed: Callable[[Any], list[str]]
) -> Reports:
    for deployment in deployments:
        if deployment.device not in devices:
            continue
        mesh = compiler.absent_mesh(deployment.device, (deployment.data, deployment.tensor), MESH_AXES)
        for num_rows in (DECODE_ROWS, PREFILL_ROWS):
            program = step_program(deployment, num_rows, mesh)
            yield _compile(compiler, deployment.device, mesh, program, find_missed)


def _compile(
    compiler: Any, device: str, mesh: Mesh, program: Program, find_missed: Callable[[Any], list[str]]
) -> tuple[PlacedProgram | None, list[str]]:
    shape = (mesh.shape["data"], mesh.shape["tensor"])
    where = f"{program.name} on {_chips(device, shape)}"
    try:
        report = compiler.compile_program(
            program.name, program.function, program.arguments, mesh, donate_argnums=program.donated
        )
    except jax.errors.JaxRuntimeError as error:
        return None, [f"{where}: does not compile: {str(error).splitlines()[0]}"]
    not_in_place, total = memory_missed(program, report), total_bytes(report)
    missed = not_in_place + find_missed(report)
    if total > MEMORY[device]:
        missed.append(f"needs {total} bytes of a device; it has {MEMORY[device]}")
    placed = PlacedProgram(
        device=device,
        mesh=shape,
        pool_tokens=program.pool.shape[0] * program.pool.shape[4],
        pool_bytes=shard_bytes(program.pool),
        total_bytes=total,
        memory_bytes=MEMORY[device],
        in_place=not not_in_place,
        program=report,
    )
    return placed, [f"{where}: {text}" for text in missed]


def _tpu_kernels_missed(report: aot_tpu.ProgramReport) -> list[str]:
    return [] if report.kernels else ["no kernel was compiled"]


def _chips(device: str, mesh: tuple[int, int]) -> str:
    return f"{device} {mesh[0]}x{mesh[1]}"


HEADER = (
    f"{'program':34s} {'device, mesh':12s} pool tokens  GiB of a device: arguments    pool aliased  total   of it"
    "  in place  temp MiB"
)


def print_program(placed: PlacedProgram) -> None:
    """Prints a line for a program, and what its kernels use where it has any."""
    report = placed.program
    sizes = (report.argument_bytes, placed.pool_bytes, report.aliased_bytes, placed.total_bytes)
    arguments, pool, aliased, total = (f"{size / 2**30:.3f}" for size in sizes)
    print(
        f"{report.name:34s} {_chips(placed.device, placed.mesh):12s} {placed.pool_tokens:11,d} {arguments:>27s} {pool:>7s}"
        f" {aliased:>7s} {total:>6s} {placed.total_bytes / placed.memory_bytes:7.1%}"
        f"  {'yes' if placed.in_place else 'no':8s} {report.temporary_bytes / 2**20:9.2f}"
    )
    for kernel in report.kernels:
        print(f"    {kernel.name}: {_kernel_text(kernel)}")


def _kernel_text(kernel: aot_cuda.KernelReport | aot_tpu.KernelReport) -> str:
    if isinstance(kernel, aot_cuda.KernelReport):
        raised = f", of workers {kernel.worker_registers}" if kernel.worker_registers else ""
        return (
            f"{kernel.registers} registers{raised}, {kernel.spill_bytes} bytes spilled, "
            f"{kernel.shared_memory_bytes:,} bytes of shared memory"
        )
    if kernel.vmem_bytes is None:
        return f"at most {kernel.vmem_limit_bytes:,} bytes of VMEM"
    return (
        f"{kernel.vmem_bytes:,} bytes of VMEM, of {kernel.vmem_limit_bytes:,}; {kernel.spill_stores} registers spilled"
    )
