"""Paged attention compiled for TPUs: vector and scalar memory, instructions, spills."""

import dataclasses
from collections.abc import Container, Iterator

from jax.sharding import NamedSharding, PartitionSpec

from penelope_jax.experiments import aot_tpu
from penelope_jax.experiments.aot_attention import Attention
from penelope_jax.experiments.aot_programs import shard_bytes

# Heads of Qwen3-8B and -32B are 32/8 and 64/8 of 128, of -235B-A22B 64/4 of 128; split over 4 chips these have 8/2, 16/2
# and 16/1.
ATTENTIONS = (
    Attention("prefill 32/8", 32, 8, 128, 64),
    Attention("prefill 64/8", 64, 8, 128, 32),
    Attention("prefill 64/4", 64, 4, 128, 32),
    Attention("prefill 8/2", 8, 2, 128, 64),
    Attention("prefill 16/1", 16, 1, 128, 32),
    Attention("prefill 32/32", 32, 32, 128, 128, num_pages=256),
    Attention("prefill 24/8", 24, 8, 128, 128, num_tiles=48),
    Attention("prefill 32/8, float32", 32, 8, 128, 64, dtype="float32", num_pages=512),
    Attention("prefill 32/8, pages of 16", 32, 8, 128, 64, page_size=16),
    Attention("prefill 32/8, pages of 128", 32, 8, 128, 64, page_size=128, num_pages=512),
    Attention("decode 32/8", 32, 8, 128, 2, num_rows=64, num_tiles=64),
    Attention("decode 64/8", 64, 8, 128, 1, num_rows=64, num_tiles=64),
    Attention("decode 64/4", 64, 4, 128, 1, num_rows=64, num_tiles=64),
    Attention("decode 8/2", 8, 2, 128, 2, num_rows=64, num_tiles=64),
    Attention("decode 16/1", 16, 1, 128, 1, num_rows=64, num_tiles=64),
    Attention("decode 32/32", 32, 32, 128, 8, num_rows=64, num_tiles=64, num_pages=256),
    Attention("decode 32/8, float32", 32, 8, 128, 2, dtype="float32", num_rows=64, num_tiles=64, num_pages=512),
    Attention("decode 32/8, pages of 16", 32, 8, 128, 2, page_size=16, num_rows=64, num_tiles=64),
    Attention("decode 32/8, 1024 rows", 32, 8, 128, 2, num_rows=1024, num_tiles=1024),
)

HEADER = f"{'program':36s} VMEM KiB of limit  SMEM KiB  instructions  with MXU  spills  temp MiB"


def compile_kernels(devices: Container[str]) -> Iterator[tuple[aot_tpu.ProgramReport, list[str]]]:
    """Compiles paged attention for those of four generations that `devices` has. Yields each report, and what misses."""
    for generation in aot_tpu.GENERATIONS:
        if generation not in devices:
            continue
        mesh = aot_tpu.absent_mesh(generation, (1,), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec())
        for sizes in ATTENTIONS:
            arguments = sizes.arguments(sharding)
            name = f"{generation} {sizes.name}"
            report = aot_tpu.compile_program(name, sizes.function("tpu"), arguments, mesh)
            missed = [] if report.kernels else ["no kernel was compiled"]
            missed += [
                f"{kernel.name} uses {kernel.vmem_bytes} bytes of VMEM; at most {kernel.vmem_limit_bytes}"
                for kernel in report.kernels
                if (kernel.vmem_bytes or 0) > kernel.vmem_limit_bytes
            ]
            if report.temporary_bytes >= shard_bytes(arguments[1]) / 2:
                missed.append("temporary memory as large as half of the pool: it is copied")
            yield report, [f"{name}: {text}" for text in missed]


def print_kernels(report: aot_tpu.ProgramReport) -> None:
    """Prints a line for each kernel of a program."""
    for kernel in report.kernels:
        numbers = dataclasses.asdict(kernel)
        vmem, smem = (
            "-" if numbers[name] is None else f"{numbers[name] / 1024:.0f}" for name in ("vmem_bytes", "smem_bytes")
        )
        counts = (
            "-" if numbers[name] is None else numbers[name] for name in ("bundles", "mxu_bundles", "spill_stores")
        )
        bundles, mxu_bundles, spill_stores = counts
        print(
            f"{report.name:36s} {vmem:>8s} {kernel.vmem_limit_bytes / 1024:8.0f} {smem:>9s} {bundles:>13} "
            f"{mxu_bundles:>9} {spill_stores:>7} {report.temporary_bytes / 2**20:9.1f}"
        )
