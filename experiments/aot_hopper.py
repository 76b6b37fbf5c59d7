"""Paged attention compiled for H100: registers, spills, shared memory, wgmma and TMA in the machine code."""

from collections.abc import Container, Iterator

from jax.sharding import NamedSharding, PartitionSpec

from penelope_jax.experiments import aot_cuda
from penelope_jax.experiments.aot_attention import Attention
from penelope_jax.experiments.aot_programs import shard_bytes

MOST_REGISTERS = 232  # of a thread, where three warpgroups share the 65,536 of a multiprocessor
_LAUNCH_REGISTERS = 65_536


# Heads of Qwen3-8B and -32B are 32/8 and 64/8 of 128, of -235B-A22B 64/4 of 128; split over 4 chips the latter has 16/1.
ATTENTIONS = (
    Attention("prefill 32/8 x 128", 32, 8, 128, 32),
    Attention("prefill 64/8 x 128", 64, 8, 128, 32),
    Attention("prefill 16/1 x 128", 16, 1, 128, 32),
    Attention("prefill 8/8 x 128", 8, 8, 128, 128),
    Attention("prefill 24/8 x 128", 24, 8, 128, 48),
    Attention("prefill 32/8 x 64", 32, 8, 64, 32),
    Attention("prefill 32/8 x 128, float16", 32, 8, 128, 32, dtype="float16"),
    Attention("prefill 32/8 x 128, pages of 16", 32, 8, 128, 32, page_size=16),
    Attention("prefill 32/8 x 128, pages of 128", 32, 8, 128, 32, page_size=128),
    Attention("decode 32/8 x 128", 32, 8, 128, 2, num_rows=64, num_tiles=64),
    Attention("decode 32/8 x 64", 32, 8, 64, 2, num_rows=64, num_tiles=64),
    Attention("decode 32/8 x 128, pages of 16", 32, 8, 128, 2, page_size=16, num_rows=64, num_tiles=64),
    Attention("decode 16/1 x 128", 16, 1, 128, 1, num_rows=64, num_tiles=64),
    Attention("decode 32/8 x 128, not split", 32, 8, 128, 2, deterministic=True, num_rows=64, num_tiles=64),
)

HEADER = f"{'program':34s} {'kernel':24s} registers  spills  shared B  wgmma  TMA load/store  exp beside  temp MiB"


def compile_kernels(devices: Container[str]) -> Iterator[tuple[aot_cuda.ProgramReport, list[str]]]:
    """Compiles paged attention for H100, if that is among `devices`. Yields each report, and what misses a bar."""
    if "h100" not in devices:
        return
    mesh = aot_cuda.absent_mesh("h100", (1,), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    for sizes in ATTENTIONS:
        arguments = sizes.arguments(sharding)
        report = aot_cuda.compile_program(sizes.name, sizes.function("gpu"), arguments, mesh)
        missed = kernels_missed(report)
        if report.temporary_bytes >= shard_bytes(arguments[1]):
            missed.append("temporary memory as large as the pool: it is copied")
        yield report, [f"{report.name}: {text}" for text in missed]


def kernels_missed(report: aot_cuda.ProgramReport) -> list[str]:
    """Returns what the kernels of a program miss."""
    missed = [] if report.kernels else ["no kernel was compiled"]
    for kernel in report.kernels:
        code = kernel.ptx if kernel.sass is None else kernel.sass
        if kernel.spill_bytes or code.get("local"):
            missed.append(f"{kernel.name} spills registers")
        if kernel.worker_registers > MOST_REGISTERS:
            missed.append(f"{kernel.name} uses {kernel.worker_registers} registers a thread; at most {MOST_REGISTERS}")
        if kernel.registers * kernel.threads > _LAUNCH_REGISTERS:
            missed.append(f"{kernel.name} uses {kernel.registers} registers in {kernel.threads} threads")
        if kernel.remarks:
            missed.append(f"{kernel.name}: {'; '.join(kernel.remarks)}")
        wanted = ("tma_load",) if kernel.name.endswith("_combine") else ("wgmma", "tma_load", "exp_beside_wgmma")
        missed += [f"{kernel.name} has no {name}" for name in wanted if not code.get(name, kernel.sass is None)]
    return missed


def print_kernels(report: aot_cuda.ProgramReport) -> None:
    """Prints a line for each kernel of a program."""
    for kernel in report.kernels:
        code = kernel.ptx if kernel.sass is None else kernel.sass
        registers = f"{kernel.registers}" + (f"/{kernel.worker_registers}" if kernel.worker_registers else "")
        print(
            f"{report.name:34s} {kernel.name:24s} {registers:>9s} {kernel.spill_bytes:7d} "
            f"{kernel.shared_memory_bytes:9d} {code['wgmma']:6d} {code['tma_load']:8d}/{code['tma_store']:<6d} "
            f"{code.get('exp_beside_wgmma', '-'):>10} {report.temporary_bytes / 2**20:9.1f}"
        )
