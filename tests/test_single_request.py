"""The single request: what is computed, the formula's numbers, and a measurement on a made-up device."""

import json
import sys

import numpy as np
import pytest

from penelope_jax.cost import units, units_of
from penelope_jax.driver import HashExecutor
from penelope_jax.errors import InputError
from penelope_jax.experiments import command, single_request
from penelope_jax.experiments.single_request import Measurement, Setting, measure, plot, table
from penelope_jax.models import registry

MODEL_B = 768  # c of model B


@pytest.mark.parametrize(("context", "expected"), [(16_384, 2.72), (32_768, 3.58)])
def test_the_formula_at_the_contexts_of_the_figure(context, expected):
    spans = Setting(context=context).spans(64)
    assert units_of(spans["tail"], MODEL_B) / units_of(spans["front"], MODEL_B) == pytest.approx(expected, abs=0.01)


def test_both_places_compute_the_same_number_of_tokens():
    spans = Setting(context=16_384).spans(64)
    assert spans == {"front": ((1024, 5952), (16_384, 16_896)), "tail": ((11_456, 16_896),)}
    assert sum(b - a for a, b in spans["front"]) == sum(b - a for a, b in spans["tail"])


@pytest.mark.parametrize("context", [1000, 1024, 1216])
def test_a_context_without_room_is_refused(context):
    with pytest.raises(ValueError, match=rf"context={context} must be whole pages of 64 tokens"):
        Setting(context=context).spans(64)


class UnitExecutor(HashExecutor):
    """Takes a time proportional to the units of a plan, on its own clock."""

    page_size, max_step_tokens, linear_cost = 64, 256, 500.0

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.computed = []

    def perf_counter(self):
        return self.now_s

    def run(self, plan, time_s=0.0):
        assert plan.num_tokens <= self.max_step_tokens
        self.computed += [(segment.start, segment.stop) for segment in plan.segments]
        self.now_s += 1e-9 * sum(units(s.start, s.stop, self.linear_cost) for s in plan.segments)
        return super().run(plan, time_s)


def test_c_is_calibrated_from_two_prefills_and_the_formula_follows(monkeypatch):
    executor = UnitExecutor()
    monkeypatch.setattr(single_request.time, "perf_counter", executor.perf_counter)
    model = registry.load_model("random:tiny")
    result = measure(model, Setting(context=8192, append=300), executor, 3)
    assert result.linear_cost == pytest.approx(500.0)
    assert result.error == pytest.approx(0.0, abs=1e-6)
    assert result.ratio == pytest.approx(result.tail_s / result.front_s)
    assert result.formula_model != pytest.approx(result.formula)
    assert (0, 256) in executor.computed and executor.computed[-1][1] == 8492


def test_times_that_no_c_explains_cost_no_measurement(monkeypatch, capsys, tmp_path):
    executor = UnitExecutor()
    monkeypatch.setattr(single_request, "measure", lambda model, setting, executor, runs: made_up(512, fits=False))
    monkeypatch.setattr(single_request.engine_options, "warm_up", lambda executor: 0)
    flags = ["--model", "random:tiny", "--contexts", "512", "--front-start", "64", "--json", str(tmp_path / "out.json")]
    parser = command.Parser()
    single_request.add_flags(parser)
    assert single_request.run(parser.parse_args(flags)) == single_request.OUT_OF_TOLERANCE
    out = capsys.readouterr().out
    assert "Context 512: no c of the formula explains 0.100 s for 2,048 tokens and 4.000 s for 512; " in out
    assert "      2.50        -      -             -                     2.72" in out
    (row,) = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert (row["ratio"], row["linear_cost"], row["error"]) == (2.5, None, None)
    assert not executor.computed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "abc"], "--contexts abc: must be numbers of at least 1 with commas between."),
        (["--free", "3"], "--free 3.0 must be above 0 and below 1."),
        (["--runs", "0"], "--runs 0 must be at least 1."),
        (["--plot", "a.xyz"], "--plot a.xyz: must end in one of .pdf, .png, .svg."),
    ],
)
def test_bad_flags_are_named(flags, message):
    parser = command.Parser()
    single_request.add_flags(parser)
    with pytest.raises(InputError) as raised:
        single_request.run(parser.parse_args(flags))
    assert str(raised.value) == message


def made_up(context, *, fits=True):
    return Measurement(
        setting=Setting(context=context),
        front_s=1.0,
        tail_s=2.5,
        ratio=2.5,
        short=2048,
        short_s=0.1,
        prefill_s=4.0,
        linear_cost=700.0 if fits else None,
        formula=2.75 if fits else None,
        formula_model=2.72,
    )


def test_table_and_plot(tmp_path):
    header, line = table([made_up(16_384)]).splitlines()
    assert len(header) == len(line) and " 16,384" in line and "-9%" in line
    plot([made_up(16_384), made_up(32_768)], str(tmp_path / "plot.svg"), "title")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_the_command_runs_on_a_tiny_model(monkeypatch, capsys, tmp_path):
    flags = ["--model", "random:tiny", "--contexts", "512", "--front-start", "64", "--append", "64", "--runs", "1"]
    flags += ["--step-tokens", "128", "--page-size", "16", "--tolerance", "100", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(
        single_request, "calibrate_linear_cost", lambda *_: 100.0
    )  # times of so small a model need not fit any c
    monkeypatch.setattr(sys, "argv", ["single_request", *flags])
    with pytest.raises(SystemExit) as stop:
        command.start_module("single_request", "x", single_request.add_flags, single_request.run)
    assert stop.value.code == 0
    assert "512" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert row["setting"]["context"] == 512 and np.isfinite(row["ratio"])
