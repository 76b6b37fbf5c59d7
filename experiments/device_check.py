"""Checks and measures the kernels and the step on a host with one Hopper GPU, part by part.

    python -m penelope_jax.experiments.device_check [--part NAME ...] [--case TEXT ...] [--json FILE] [--budget-s S]

Parts, in this order:
    ceilings      bfloat16 matrix products, device copies; runs before others that need it
    kernels       paged attention against the float32 oracle, bits of holes, controls
    prefill       attention of holes and new tokens, beside cuDNN's dense flash attention and XLA
    decode        attention of 1, 16 and 64 rows at 32K and 128K
    figure1       a hole in front against one at the end, 8K to 128K
    batching      a hole and new tokens in one step against two unrelated requests
    bit-identity  rows of matrix products; pages refilled in deterministic mode
    step          whole steps of Qwen3-8B, c of this device
    host          pinned host memory: bandwidth, swaps, what a prefill loses while pages move

The whole takes about 6 minutes, compilation included (reckoned, not measured). A case that fails is reported and the
next one runs; where it hangs, or breaks the device, its part ends and the others run in a new process. FILE is written
after every case. Exits with 1 where a part failed or a bar is missed.

From a checkout in which the package is not installed, without a network, either of

    python -m pip install --no-deps --no-build-isolation -e . && python -m penelope_jax.experiments.device_check
    python -c 'import penelope_jax as p, runpy; p.__path__.append("."); runpy.run_module("penelope_jax.experiments.device_check", run_name="__main__")'

It needs jax with its CUDA plugin, flax, numpy, absl-py and tqdm, no other package. Without a GPU: --dry runs everything
in tiny sizes on the CPU, where no time means anything; --compile-only compiles every program in its real size for an
H200 that is not there (extra `aot`, see `aot_check.py`).
"""

import argparse
import functools
import gc
import importlib
import importlib.metadata
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from penelope_jax.errors import InputError
from penelope_jax.experiments import command, device_supervisor, engine_options
from penelope_jax.experiments.device_report import Result, describe, table, write_document

# Part: module, and its functions that yield programs and that run.
PARTS = {
    "ceilings": ("device_ceilings", "programs", "run"),
    "kernels": ("device_kernels", "programs", "run"),
    "prefill": ("device_attention", "prefill_programs", "run_prefill"),
    "decode": ("device_attention", "decode_programs", "run_decode"),
    "figure1": ("device_steps", "layer_programs", "run_figure1"),
    "batching": ("device_steps", "batching_programs", "run_batching"),
    "bit-identity": ("device_bits", "programs", "run"),
    "step": ("device_steps", "step_programs", "run_step"),
    "host": ("device_link", "programs", "run"),
}
_NEED_CEILINGS = ("prefill", "decode", "step")
_FRESH = ("step",)  # takes most of the memory, in one piece
_MEMORY_FRACTION = "0.85"  # of the device's memory: some stays for cuDNN and cuBLAS


def chosen_parts(names: Iterable[str] | None) -> list[str]:
    """Returns the parts to run, in order, with what they need."""
    chosen = set(names or PARTS)
    if chosen.intersection(_NEED_CEILINGS):
        chosen.add("ceilings")
    return [name for name in PARTS if name in chosen]


def part_function(name: str, kind: str) -> Callable[..., Any]:
    """Returns a part's `programs` or `run`. Only then is jax imported."""
    module, programs, run = PARTS[name]
    found = importlib.import_module(f"penelope_jax.experiments.{module}")
    return getattr(found, {"programs": programs, "run": run}[kind])


def run_parts(names: list[str], host: Any, document: dict[str, Any], save: Callable[[], None]) -> list[str]:
    """Runs parts and puts into `document` what they find.

    Args:
        names: of the parts.
        host: a `device_host.Host`.
        document: what is saved; `parts` and `ceilings` of parts that ran before are in it.
        save: writes it.

    Returns:
        Parts that are left for another process: the device does not answer any more, or they want it for themselves.
    """
    host.ceilings.update(document["ceilings"])
    for index, name in enumerate(names):
        if name in _FRESH and index and not host.dry:
            return names[index:]
        begin = time.monotonic()
        entry: dict[str, Any] = {"status": "running"}
        document["parts"][name] = entry
        if host.out_of_time():
            entry["status"] = "skipped: no time left"
            save()
            continue

        save()
        result = Result(dry=host.dry)

        def keep(entry=entry, begin=begin, result=result):
            entry.update(result.document(), seconds=round(time.monotonic() - begin, 1))
            document["ceilings"] = dict(host.ceilings)
            save()

        result.save = keep
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            part_function(name, "run")(host, result)
        except Exception as error:  # noqa: BLE001  # a part that fails is reported, and the next one runs
            result.errors.append(describe(error))
        entry["status"] = "failed" if result.errors else "done"
        keep()
        gc.collect()
        print_part(name, entry)
        if result.errors and not host.answers():
            entry["errors"].append("The device does not answer any more.")
            save()
            return names[index + 1 :]
    return []


def print_part(name: str, entry: dict[str, Any]) -> None:
    """Prints what a part found."""
    print(f"\n{name}: {entry['status']}, {entry['seconds']} s")
    if entry["rows"]:
        print(table(entry["rows"]))
    for figure, value in entry["figures"].items():
        print(f"  {figure}: {f'{value:,.4g}' if isinstance(value, float) else value}")
    for text in entry["errors"]:
        print(f"  FAILED {text}")
    for case in entry["skipped"]:
        print(f"  skipped, no time left: {case}")
    print_bars(entry)
    sys.stdout.flush()


def print_bars(entry: dict[str, Any]) -> None:
    """Prints which bars a part met."""
    for bar in entry["bars"]:
        verdict = {True: "met", False: "MISSED", None: "not judged"}[bar["met"]]
        value = "none" if bar["value"] is None else f"{bar['value']:.4g}"
        print(f"  {verdict:10s} {bar['name']}: {value} ({'>=' if bar['at_least'] else '<='} {bar['limit']:g})")


def summary(document: dict[str, Any]) -> int:
    """Prints how the run ended and adds it to the document; returns the exit code."""
    parts = document["parts"]
    bars = [(name, bar) for name, part in parts.items() for bar in part.get("bars", ())]
    missed = [f"{name}: {bar['name']}" for name, bar in bars if bar["met"] is False]
    failed = [name for name, part in parts.items() if not part["status"].startswith(("done", "skipped"))]
    document |= {"missed": missed, "failed": failed, "seconds": round(time.time() - document["begin"], 1)}
    times = ", ".join(f"{name} {part.get('seconds', 0):.0f}" for name, part in parts.items())
    print(f"\n{document['seconds']:.0f} s in all: {times}.")
    if document["dry"]:
        print("A dry run: no time or rate above means anything.")
    num_met = sum(bar["met"] is True for _, bar in bars)
    print(f"Bars: {num_met} met, {len(missed)} missed. Parts failed: {', '.join(failed) or 'none'}.")
    for text in missed:
        print(f"MISSED {text}")
    return 1 if missed or failed else 0


def new_document(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what is written before anything ran."""
    return {
        "dry": args.dry,
        "date": datetime.now(UTC).date().isoformat(),
        "begin": time.time(),
        "commit": engine_options.commit(),
        "python": platform.python_version(),
        "seed": 0,
        "ceilings": {},
        "parts": {},
    }


def _run_child(args: argparse.Namespace, names: list[str], document: dict[str, Any], save: Callable[[], None]) -> int:
    """Runs in a process of its own: the first that imports jax. Returns its exit code."""
    if args.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)
    import jax
    from jax.extend import backend

    from penelope_jax.experiments.device_host import Host
    from penelope_jax.kernels.paged_attention import resolve_implementation

    device = jax.devices()[0]
    if not args.dry:
        try:
            resolve_implementation("gpu")
        except ValueError:
            print(
                f"device_check: error: jax finds {device.device_kind!r}, not a Hopper GPU; --dry runs tiny sizes on the "
                "CPU, --compile-only compiles without a device.",
                file=sys.stderr,
            )
            return command.BAD_INPUT
    host = Host.here(dry=args.dry, deadline_s=args.deadline_s, cases=tuple(args.case or ()))
    versions = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": backend.get_backend().platform_version,
    }
    document |= versions | {"device": device.device_kind, "usable_bytes": host.usable_bytes}
    print(f"{device.device_kind}, jax {jax.__version__}", file=sys.stderr)
    return device_supervisor.AGAIN if run_parts(names, host, document, save) else 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("--part", action="append", choices=list(PARTS), help="what to run; by default everything")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases whose names contain TEXT")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--budget-s", type=float, default=480.0, metavar="S", help="start nothing after S seconds (480)"
    )
    parser.add_argument(
        "--case-limit-s", type=float, default=90.0, metavar="S", help="end a process whose case takes longer (90)"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--compile-only", action="store_true", help="compile for an H200 that is not there")


def run(args: argparse.Namespace) -> int:
    """Runs the parts; see the module's text."""
    engine_options.check_output("--json", args.json)
    if args.dry and args.compile_only:
        raise InputError("--dry and --compile-only: one of them.")
    for name in ("budget_s", "case_limit_s"):
        if not getattr(args, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0.")
    names, document = chosen_parts(args.part), new_document(args)
    if args.compile_only:
        from penelope_jax.experiments.device_compile import compile_parts

        parts = {name: part_function(name, "programs") for name in names}
        return compile_parts(parts, document, args.json)
    args.deadline_s = time.monotonic() + args.budget_s
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(args.json or pathlib.Path(folder, "parts.json"))
        child = functools.partial(_run_child, args)
        code = device_supervisor.supervise(child, names, document, path, args.case_limit_s)
        if code:
            return code
        code = summary(document)
        write_document(path, document)
    return code


if __name__ == "__main__":
    command.start_module("device_check", "Check and measure the kernels and the step on a GPU.", add_flags, run)
