"""Synthetic sessions: their statistics against the quantiles they are drawn from, and repeatability."""

import dataclasses
import math

import numpy as np
import pytest

from penelope_jax.experiments import synthesize as s
from penelope_jax.experiments.synthesize import SynthesisOptions, quantile, synthesize


@pytest.fixture(scope="module")
def sessions():
    return synthesize(SynthesisOptions(sessions=300, context=1_000_000))


def pairs(sessions):
    return [(a, b) for session in sessions for a, b in zip(session.turns, session.turns[1:], strict=False)]


def assert_quantiles(values, table, tolerance=0.2, upto=0.91):
    for probability, expected in table:
        if 0 < probability < upto:
            assert np.quantile(values, probability) == pytest.approx(expected, rel=tolerance), probability


def test_quantiles_are_met_between_on_a_log_scale():
    table = ((0.0, 1), (0.5, 100), (1.0, 10_000))
    assert quantile(table, 0.5) == pytest.approx(100)
    assert quantile(table, 0.25) == pytest.approx(10)
    assert quantile(table, 0.75) == pytest.approx(1_000)


def test_statistics_follow_the_measured_quantiles(sessions):
    turns = [turn for session in sessions for turn in session.turns]
    assert_quantiles([turn.output_len for turn in turns], s.OUTPUT)
    assert_quantiles([len(session.turns) for session in sessions], s.TURNS, tolerance=0.35)
    assert_quantiles([session.turns[0].prompt_len for session in sessions], s.FIRST_PROMPT)
    added = [b.prompt_len - min(b.keep, a.prompt_len) for a, b in pairs(sessions)]
    assert_quantiles(added, s.ADDED, tolerance=0.3)
    for kind, table in (("tool", s.TOOL_DELAY_S), ("human", s.HUMAN_DELAY_S)):
        assert_quantiles([b.delay_s for _, b in pairs(sessions) if b.kind == kind], table)
    assert np.mean([b.kind == "human" for _, b in pairs(sessions)]) == pytest.approx(0.15, abs=0.02)


def test_few_turns_diverge_and_some_of_them_compact(sessions):
    diverging = [(a, b) for a, b in pairs(sessions) if b.keep < a.prompt_len]
    assert len(diverging) / len(pairs(sessions)) == pytest.approx(0.022, abs=0.006)
    compacted = [b for _, b in diverging if b.keep == 15_000]
    assert 0.1 < len(compacted) / len(diverging) < 0.4


def test_all_sessions_share_the_prefix_and_nothing_else(sessions):
    assert {session.turns[0].new[0] for session in sessions} == {("shared", 0, 15_000)}
    labels = [piece.label for session in sessions for turn in session.turns for piece in turn.new]
    own = [label for label in labels if label != "shared"]
    assert len(set(own)) == len(own)


def test_same_options_same_sessions_and_each_depends_on_its_index_only():
    options = SynthesisOptions(sessions=3, turns=20, scale=64, context=1024, seed=7)
    assert synthesize(options) == synthesize(options)
    assert synthesize(SynthesisOptions(sessions=2, turns=20, scale=64, context=1024, seed=7)) == synthesize(options)[:2]
    assert synthesize(SynthesisOptions(sessions=3, turns=20, scale=64, context=1024, seed=8)) != synthesize(options)


def test_turns_and_context_are_kept():
    options = SynthesisOptions(sessions=20, turns=12, scale=16, context=2048)
    lengths = [len(session.turns) for session in synthesize(options)]
    assert max(lengths) == 12 and min(lengths) >= 1
    assert max(turn.history_len for session in synthesize(options) for turn in session.turns) <= 2048


def test_side_requests_fork_off_and_nothing_builds_on_them():
    options = SynthesisOptions(sessions=30, turns=20, scale=64, context=2048)
    (with_sides, without) = (synthesize(dataclasses.replace(options, side_rate=rate)) for rate in (0.5, 0.0))
    sides = 0
    for session, plain in zip(with_sides, without, strict=True):
        main = [turn for turn in session.turns if math.isinf(turn.cancel_s)]
        assert [turn.new for turn in main] == [turn.new for turn in plain.turns]
        for index, turn in enumerate(session.turns):
            if math.isfinite(turn.cancel_s):
                sides += 1
                base, after = session.turns[turn.base], session.turns[index + 1]
                assert turn.base == after.base == index - 1 and after.delay_s == 0.0
                assert (base.prompt_len + 234) // 2 <= turn.keep <= base.prompt_len
    assert sides / sum(len(session.turns) for session in without) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sessions": 0}, "sessions=0 must be at least 1."),
        ({"turns": 0}, "turns=0 must be at least 1."),
        ({"scale": 5}, "scale=5 must be a power of two from 1 to 64."),
        ({"human_share": 1.5}, "human_share=1.5 must be in [0, 1]."),
        ({"seed": -1}, "shared_prefix=15000 and seed=-1 must be at least 0."),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(ValueError) as error:
        SynthesisOptions(**options)
    assert str(error.value) == reason


def test_a_context_below_the_shared_prefix_is_refused():
    with pytest.raises(ValueError, match=r"context=100 \(scaled tokens\) is too small: the shared prefix has 15000"):
        synthesize(SynthesisOptions(context=100))
