"""Compiles for accelerators that are not there and checks what the compilers say.

    python -m penelope_jax.experiments.aot_check [--part NAME ...] [--device NAME ...] [--json FILE]

Parts:
    hopper-kernels  paged attention for H100: registers, spills, shared memory, wgmma and TMA in the machine code
    hopper-copies   writes of K/V and page copies for H100 and H200: in place
    hopper-steps    the whole step of Qwen3-8B, -32B and -235B-A22B on H100 and H200: bytes of a device, in place
    tpu-kernels     paged attention for TPU v5e, v5p, v6e and 7x: vector and scalar memory, instructions, spills
    tpu-copies      as hopper-copies, for TPUs
    tpu-steps       as hopper-steps, for TPUs

In a virtual environment of its own, as the plugins make other programs look for their devices:

    pip install -e '.[aot,tpu]' && JAX_PLATFORMS=cpu python -m penelope_jax.experiments.aot_check

Exits with 1 where a bar is missed. `experiments/results/` has what it printed.
"""

import argparse
import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Container, Iterator
from datetime import UTC, datetime
from typing import Any

from penelope_jax.experiments import aot_cuda, aot_hopper, aot_slices, aot_tpu_kernels
from penelope_jax.experiments.aot_models import MEMORY
from penelope_jax.experiments.command import start_module
from penelope_jax.metrics import write_json


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to compile.

    Attributes:
        compile: for some devices, yields the report of each program, a dataclass, or None if it does not compile; and
            what misses a bar.
        header: what stands above the reports.
        show: prints a report.
    """

    compile: Callable[[Container[str]], Iterator[tuple[Any, list[str]]]]
    header: str
    show: Callable[[Any], None]


PARTS = {
    "hopper-kernels": Part(aot_hopper.compile_kernels, aot_hopper.HEADER, aot_hopper.print_kernels),
    "hopper-copies": Part(aot_slices.compile_gpu_copies, aot_slices.HEADER, aot_slices.print_program),
    "hopper-steps": Part(aot_slices.compile_gpu_steps, aot_slices.HEADER, aot_slices.print_program),
    "tpu-kernels": Part(aot_tpu_kernels.compile_kernels, aot_tpu_kernels.HEADER, aot_tpu_kernels.print_kernels),
    "tpu-copies": Part(aot_slices.compile_tpu_copies, aot_slices.HEADER, aot_slices.print_program),
    "tpu-steps": Part(aot_slices.compile_tpu_steps, aot_slices.HEADER, aot_slices.print_program),
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=list(PARTS), help="what to compile; by default everything")
    parser.add_argument(
        "--device", action="append", choices=list(MEMORY), help="what to compile for; by default every one of the part"
    )
    parser.add_argument("--json", metavar="FILE")


def _compilers() -> Iterator[tuple[str, str | None]]:
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, None
    yield "ptxas", aot_cuda.ptxas_version()


def _run(args: argparse.Namespace) -> int:
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "compilers": {name: version for name, version in _compilers() if version},
    }
    all_missed = []
    for name in args.part or PARTS:
        part, results[name] = PARTS[name], []
        print(f"{name}\n{part.header}", flush=True)
        for report, missed in part.compile(args.device or MEMORY):
            all_missed += missed
            if report is not None:
                results[name].append(dataclasses.asdict(report))
                part.show(report)
            sys.stdout.flush()
    for text in all_missed:
        print(f"MISSED {text}")
    results["missed"] = all_missed
    if args.json:
        write_json(args.json, results)
    return 1 if all_missed else 0


if __name__ == "__main__":
    start_module("aot_check", "Compiles for accelerators that are not there.", _add_flags, _run)
