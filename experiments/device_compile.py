"""Compiles every program of `device_check.py` in its real size for an H200 that is not there.

What is found without a GPU: shapes that do not fit, kernels that do not compile or spill, pools that are copied, more
memory than the smaller device has. cuDNN's programs need cuDNN; where it is not installed they are told, not judged.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from penelope_jax.experiments import aot_cuda
from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_report import describe, table, write_document
from penelope_jax.models.layers import MESH_AXES


def compile_parts(
    parts: Mapping[str, Callable[[Host], Iterator[Program]]], document: dict[str, Any], path: str | None
) -> int:
    """Compiles the programs of parts and prints a line for each.

    Args:
        parts: what yields a part's programs, by name.
        document: gets what was found.
        path: where it is written, if anywhere.

    Returns:
        1 where a program does not compile or is not as it must be, else 0.
    """
    host = Host(mesh=aot_cuda.absent_mesh("h200", (1, 1), MESH_AXES))
    document |= {"compiled_only": True, "jax": jax.__version__, "ptxas": aot_cuda.ptxas_version()}
    rows, problems = [], []
    document |= {"programs": rows, "failed": problems}
    for name, programs in parts.items():
        for program in programs(host):
            if any(row["program"] == program.name for row in rows):
                continue
            row, found = _compile(host, name, program)
            rows.append(row)
            problems += [f"{name}, {program.name}: {text}" for text in found]
            if path:
                write_document(path, document)
    print(table(rows))
    for text in problems:
        print(f"FAILED {text}")
    seconds = sum(row["seconds"] for row in rows)
    print(f"{len(rows)} programs, {seconds:.0f} s, {len(problems)} problems. Nothing has run.")
    return 1 if problems else 0


def _compile(host: Host, part: str, program: Program) -> tuple[dict[str, Any], list[str]]:
    """Returns a row of the table, and what is wrong."""
    print(f"  {part}: {program.name} ...", file=sys.stderr, end="", flush=True)
    begin = time.monotonic()
    row: dict[str, Any] = {"program": program.name, "part": part}
    problems = []
    try:
        report = aot_cuda.compile_program(
            program.name, program.function, program.arguments, host.mesh, donate_argnums=program.donate
        )
    except Exception as error:  # noqa: BLE001  # what does not compile is reported, and the next program is compiled
        row["note"] = "needs cuDNN" if program.needs_cudnn else "FAILED"
        if not program.needs_cudnn:
            problems.append(describe(error))
    else:
        needed = report.argument_bytes + report.output_bytes - report.aliased_bytes + report.temporary_bytes
        row |= {
            "arguments GiB": report.argument_bytes / 2**30,
            "temporary GiB": report.temporary_bytes / 2**30,
            "kernels": len(report.kernels),
            "registers": max((kernel.worker_registers or kernel.registers for kernel in report.kernels), default=None),
            "spill bytes": sum(kernel.spill_bytes for kernel in report.kernels),
        }
        donated = sum(_bytes(program.arguments[index]) for index in program.donate)
        if report.aliased_bytes < donated:
            problems.append(f"{report.aliased_bytes} of {donated} donated bytes are updated in place")
        if row["spill bytes"]:
            problems.append(f"a kernel spills {row['spill bytes']} bytes")
        if needed > host.usable_bytes:
            problems.append(f"needs {needed} bytes; an H100 has {host.usable_bytes} for arrays")
    row["seconds"] = round(time.monotonic() - begin, 1)
    print(f" {row['seconds']} s{''.join(f' FAILED: {text}' for text in problems)}", file=sys.stderr, flush=True)
    return row, problems


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
