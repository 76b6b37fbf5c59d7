"""The check of a GPU host, on a CPU: its parts in tiny sizes, what it writes, and what happens when a part goes wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, cast

import jax
import numpy as np
import pytest
from process_group import started

from penelope_jax.experiments import device_check, device_kernels, device_supervisor
from penelope_jax.experiments.device_attention import REAL as ATTENTION
from penelope_jax.experiments.device_attention import batch, num_pages
from penelope_jax.experiments.device_host import Host
from penelope_jax.experiments.device_model import fill_steps
from penelope_jax.experiments.device_report import Result, table
from penelope_jax.experiments.device_steps import REAL as STEPS
from penelope_jax.experiments.device_timing import time_calls
from penelope_jax.kernels.paged_attention import ragged_paged_attention
from penelope_jax.models.layers import MESH_AXES

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICK = ["ceilings", "prefill", "decode", "figure1", "batching", "step", "host"]


def command(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "penelope_jax.experiments.device_check", *flags]
    return subprocess.run(line, check=False, capture_output=True, text=True, env={**os.environ, **environment})


def empty_document() -> dict:
    return {"ceilings": {}, "parts": {}}


def test_quick_parts_run_in_a_dry_run():
    document, saved = empty_document(), []
    host = Host.here(dry=True)
    assert device_check.run_parts(QUICK, host, document, lambda: saved.append(json.dumps(document))) == []
    parts = document["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(QUICK, "done")
    assert json.loads(saved[-1]) == document
    for part in parts.values():
        assert part.keys() >= {"rows", "figures", "bars", "errors", "skipped", "seconds"}
        assert part["rows"] or part["figures"]
    judged = [bar["name"] for part in parts.values() for bar in part["bars"] if bar["met"] is not None]
    assert judged == ["bytes that differ after a swap and back", "control, bytes that differ after one swap"]
    assert all(bar["met"] is not False for part in parts.values() for bar in part["bars"])
    names = " ".join(bar["name"] for part in parts.values() for bar in part["bars"])
    for text in ("matmul ceiling", "copy ceiling", "off the formula", "cost of batching", "slower"):
        assert text in names
    assert document["ceilings"].keys() == {"matmul", "copy"}
    assert "cuDNN is not detected" in str(parts["prefill"]["figures"])


def checked(monkeypatch, attend) -> dict[str, bool | None]:
    """Runs the part `kernels` with `attend` in the kernel's place; returns which bars of the prefill are met."""

    def instead(*arguments, implementation, interpret, **options):
        return attend(*arguments, implementation="reference", **options)

    monkeypatch.setattr(device_kernels, "ragged_paged_attention", instead)
    result = Result(dry=True)
    device_kernels.run(Host.here(dry=True, cases=("prefill",)), result)
    assert result.errors == []
    return {bar.name.partition(": ")[2]: bar.met for bar in result.bars}


ALL_MET = {
    "worst error": True,
    "not finite or not zero": True,
    "control, mask one less": True,
    "bits that differ": True,
}


def test_a_right_kernel_meets_the_bars(monkeypatch):
    assert checked(monkeypatch, ragged_paged_attention) == ALL_MET


def test_control_a_wrong_kernel_misses_them(monkeypatch):
    def swapped(q, pool, *rest, **options):
        return ragged_paged_attention(q, pool[:, :, ::-1], *rest, **options)

    assert checked(monkeypatch, swapped) == ALL_MET | {"worst error": False}


def test_control_a_kernel_that_ignores_a_shifted_mask_misses_the_control(monkeypatch):
    """It rounds positions up to even ones, where those of the step stand; those of the hole do not."""

    def rounding(q, pool, layer, tiles, page_table, **options):
        even = tiles.at[:, 2].set((tiles[:, 2] + 1) // 2 * 2)
        return ragged_paged_attention(q, pool, layer, even, page_table, **options)

    missed = {"control, mask one less": False, "bits that differ": False}
    assert checked(monkeypatch, rounding) == ALL_MET | missed


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path):
    done = command("--dry", "--json", str(tmp_path / "dry.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "dry.json").read_text())
    assert document["dry"] is True
    assert list(document["parts"]) == list(device_check.PARTS)
    assert document["failed"] == document["missed"] == []


def test_the_command_writes_what_it_did(tmp_path):
    path = tmp_path / "dry.json"
    done = command("--dry", "--part", "ceilings", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["dry"] is True
    assert document["parts"]["ceilings"]["status"] == "done"
    assert document.keys() >= {
        "date",
        "commit",
        "jax",
        "jaxlib",
        "python",
        "device",
        "seed",
        "seconds",
        "missed",
        "failed",
    }
    assert "no time or rate above means anything" in done.stdout


def test_it_needs_few_packages_and_no_installation():
    """On a host that has jax but not what the cache, checkpoints and tokenizers need, from a bare checkout."""
    absent = ("immutables", "orbax", "tokenizers", "safetensors", "jinja2", "hypothesis", "pytest", "matplotlib")
    code = f"""
import importlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(finder)]
sys.modules.update(dict.fromkeys({absent}))
import penelope_jax
penelope_jax.__path__.append(".")
for module in {sorted({f"penelope_jax.experiments.{part[0]}" for part in device_check.PARTS.values()})} + [
    "penelope_jax.experiments.device_check", "penelope_jax.experiments.device_compile"
]:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_it_says_what_can_run():
    done = command("--part", "ceilings", JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "jax finds 'cpu', not a Hopper GPU; --dry runs tiny sizes" in done.stderr


def test_a_part_that_fails_is_reported_and_the_others_run(monkeypatch):
    def run(host, result):
        with result.case("first"):
            raise ValueError("a shape\nthat does not fit")
        with result.case("second"):
            result.row("second", ms=1.0)
        raise RuntimeError("outside of a case")

    monkeypatch.setattr(device_check, "part_function", lambda name, kind: run)
    document = empty_document()
    host = Host.here(dry=True)
    assert device_check.run_parts(["kernels", "host"], host, document, lambda: None) == []
    for part in document["parts"].values():
        assert part["status"] == "failed"
        assert part["rows"] == [{"case": "second", "ms": 1.0}]
        assert part["errors"][0].startswith("first: ValueError: a shape that does not fit (test_device_check.py:")
        assert part["errors"][1].startswith("RuntimeError: outside of a case")
    document |= {"dry": False, "begin": time.time()}
    assert device_check.summary(document) == 1


def test_a_part_that_needs_all_memory_gets_its_own_process(monkeypatch):
    monkeypatch.setattr(device_check, "part_function", lambda name, kind: lambda host, result: None)
    host, names, ran = Host.here(dry=False), ["ceilings", "step", "host"], []
    while names:
        document = empty_document()
        names = device_check.run_parts(names, host, document, lambda: None)
        ran.append(list(document["parts"]))
    assert ran == [["ceilings"], ["step", "host"]]


def test_no_part_starts_when_the_time_is_over():
    document = empty_document()
    device_check.run_parts(["ceilings"], Host.here(dry=True, deadline_s=0.0), document, lambda: None)
    assert document["parts"]["ceilings"]["status"] == "skipped: no time left"


def broken_child(names, document, save):
    """Hangs in `hangs`, is killed in `crashes`, wants a new process after `breaks`; the rest are done at once."""
    for index, name in enumerate(names):
        document["parts"][name] = {"status": "running", "running": "its case"}
        save()
        if name == "hangs":
            time.sleep(60)
        if name == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        document["parts"][name] = {"status": "failed" if name == "breaks" else "done"}
        save()
        if name == "breaks":
            assert names[index + 1 :]
            return device_supervisor.AGAIN
    return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_the_part_that_runs(tmp_path, number, code):
    """It reaches parent and child, and at once, whatever the child is doing."""
    text = f"""
import argparse, os, pathlib, signal, time
from penelope_jax.experiments import command, device_supervisor

def child(names, document, save):
    print(os.getpid(), flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:  # as JAX does in a callback
            pass

def run(args):
    return device_supervisor.supervise(child, ["part"], {{"parts": {{}}}}, pathlib.Path({str(tmp_path / "p.json")!r}), 60)

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
raise SystemExit(command.execute(argparse.Namespace(run=run, prog="device_check")))
"""
    with started(text) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == code and errors.startswith("device_check: ") and errors.count("\n") == 1, errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_parts_that_hang_or_crash_leave_the_others(tmp_path):
    """In a process without jax, as the command has it."""
    code = f"""
import json, pathlib, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import os, signal, time, inspect
from penelope_jax.experiments import device_supervisor
assert "jax" not in sys.modules
namespace = dict(os=os, signal=signal, time=time, device_supervisor=device_supervisor)
exec(pathlib.Path({str(tmp_path / "child.py")!r}).read_text(), namespace)
document = {{"parts": {{}}}}
names = ["fine", "hangs", "crashes", "breaks", "fine too"]
path = pathlib.Path({str(tmp_path / "parts.json")!r})
assert device_supervisor.supervise(namespace["broken_child"], names, document, path, 0.5) == 0
print(json.dumps(document["parts"]))
"""
    import inspect

    (tmp_path / "child.py").write_text(inspect.getsource(broken_child))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status = {name: part["status"] for name, part in json.loads(done.stdout).items()}
    assert status == {
        "fine": "done",
        "hangs": "failed: no case ended within 0.5 s; the process was killed",
        "crashes": "failed: the process ended with -9",
        "breaks": "failed",
        "fine too": "done",
    }
    assert "FAILED hangs, its case: no case ended" in done.stderr


def test_parts_that_need_ceilings_bring_them():
    assert device_check.chosen_parts(["decode", "kernels"]) == ["ceilings", "kernels", "decode"]
    assert device_check.chosen_parts(["host"]) == ["host"]
    assert device_check.chosen_parts(None) == list(device_check.PARTS)


MANY_KERNELS = ("kernels", "prefill", "decode")


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.slow if part in MANY_KERNELS else ()) for part in device_check.PARTS]
)
def test_every_program_of_a_gpu_host_can_be_traced(part):
    """In its real size, for a device that is not there: shapes fit, and every argument is one that kernels take."""
    hopper = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((1, 1), MESH_AXES, axis_types=automatic, abstract_device=hopper)
    programs = list(device_check.part_function(part, "programs")(Host(mesh=cast(Any, mesh))))
    assert programs
    with jax.sharding.use_abstract_mesh(mesh):
        for program in programs:
            if not program.needs_cudnn:
                jax.eval_shape(program.function, *program.arguments)


def test_real_sizes_fill_their_steps():
    for context, hole in STEPS.contexts:
        assert 0.28 <= hole / context <= 0.32
        end = context + STEPS.append
        front = fill_steps(((STEPS.front_start, STEPS.front_start + hole), (context, end)), STEPS.layers.rows)
        tail = fill_steps(((context - hole, end),), STEPS.layers.rows)
        sizes = [[sum(stop - start for start, stop in step) for step in steps] for steps in (front, tail)]
        assert sizes[0] == sizes[1]
        assert end <= STEPS.layers.max_context
        assert all(start % STEPS.layers.page_size == 0 for step in front + tail for start, _ in step)
    assert STEPS.hole + STEPS.append == STEPS.layers.rows[-1]
    with pytest.raises(ValueError, match="24 tokens of .* are left over; steps have"):
        fill_steps([(0, 1048)], STEPS.layers.rows)


def test_real_prefills_have_rows_and_pages_of_their_own():
    for prefill in ATTENTION.prefills:
        num_rows, tiles, decode_tiles, page_table = batch(ATTENTION, prefill)
        covered = np.concatenate([np.arange(row, row + n) for _, row, _, n in [*tiles, *decode_tiles]])
        np.testing.assert_array_equal(np.sort(covered), np.arange(num_rows))
        used = [page_table[0], page_table[1]]
        used += [row[: (prefill.decode_at + 1) // ATTENTION.heads.page_size] for row in page_table[2:]]
        pages = np.concatenate(used)
        assert len(np.unique(pages)) == len(pages)
        assert pages.max() < num_pages(ATTENTION)
        last = [(segment, first + n - 1) for segment, _, first, n in [*tiles, *decode_tiles]]
        assert max(position for _, position in last) < ATTENTION.context


def test_calls_are_timed_in_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or time.sleep(0.002) for name in "ab"}
    times = time_calls(calls, num_runs=3, least_s=0.004)
    turns = "".join(order)
    assert turns.startswith("aa") and turns.rstrip("b").endswith("a")
    assert turns.count("ab") == turns.count("ba") + 1 == 4
    assert all(0.002 <= t.fastest <= t.seconds <= t.slowest for t in times.values())


def test_tables_show_what_a_row_lacks():
    text = table([{"case": "a", "ms": 12345.6}, {"case": "bc", "share": 0.0001234, "rows": 1234}])
    assert text.splitlines() == [
        "case      ms    share   rows",
        "a     12,346        -      -",
        "bc         -  1.2e-04  1,234",
    ]
