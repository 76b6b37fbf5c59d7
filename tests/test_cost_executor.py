"""Times of steps against hand calculation; the virtual clock, links and samples of the simulator's executor."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from penelope_jax.cost import units
from penelope_jax.cost_executor import CostExecutor, VirtualClock
from penelope_jax.device_profiles import PROFILES, DeviceProfile, profile_named
from penelope_jax.models.layers import parameter_shapes
from penelope_jax.models.model_costs import model_costs
from penelope_jax.models.presets import PRESETS
from penelope_jax.moves import Move, MoveKind
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepPlan
from penelope_jax.step_time import ModelCosts, StepTimer, scaled_linear_cost

# Round numbers: a unit takes 1 ms, a byte of device memory 1 us, a byte of the link 10 us.
DEVICE = DeviceProfile(
    name="round",
    source="this test",
    peak_flops=8e3,
    memory_bandwidth=2e6,
    link_bandwidth=1e5,
    compute_share=0.5,
    memory_share=0.5,
    link_share=1.0,
    step_s=0.5,
    segment_s=0.25,
    move_s=2.0,
)
MODEL = ModelCosts(name="round", linear_cost=10.0, unit_flops=4.0, weight_bytes=1e6, kv_bytes_per_token=1000.0)
TIMER = StepTimer(MODEL, DEVICE)


def row(kind, start, stop, *, request_id=0, sample=True):
    return Segment(
        request_id=request_id,
        kind=kind,
        start=start,
        stop=stop,
        tokens=np.zeros(stop - start, np.int32),
        page_table=np.zeros(1, np.int32),
        write_from=start,
        sample=SamplingParams() if sample else None,
    )


def decode(position, request_id=0):
    return row(SegmentKind.DECODE, position, position + 1, request_id=request_id)


def plan(*segments, step=0):
    return StepPlan(step=step, segments=segments)


def executor(timer=TIMER, **options):
    return CostExecutor(timer, page_size=4, clock=VirtualClock(), **options)


# Steps.


def test_a_prefill_is_bound_by_its_units():
    # 100 tokens from 0: 100 x 10 + 99 x 100 / 2 units of 1 ms; memory: 1e6 bytes of weights and 100 tokens of K/V.
    assert TIMER.seconds([row(SegmentKind.REAL, 0, 100)]) == pytest.approx(5.95 + 0.5 + 0.25)


def test_a_decode_is_bound_by_reading():
    # Position 500 attends to 501 tokens: 1 s of weights and 0.501 s of K/V, against 0.51 s of computing.
    assert TIMER.seconds([decode(500)]) == pytest.approx(1.0 + 0.501 + 0.5 + 0.25)
    assert TIMER.decode_seconds(1, 500) == TIMER.seconds([decode(500)])


def test_weights_are_read_once_for_all_rows():
    rows = [decode(500), decode(300, 1)]
    assert TIMER.seconds(rows) == pytest.approx(1.0 + 0.501 + 0.301 + 0.5 + 2 * 0.25)
    assert TIMER.decode_seconds(2, 800) == TIMER.seconds(rows)


def test_a_step_takes_the_longer_of_computing_and_reading_of_all_its_rows():
    rows = [row(SegmentKind.PHANTOM, 100, 150, sample=False), row(SegmentKind.REAL, 200, 220), decode(90, 1)]
    compute = (units(100, 150, 10) + units(200, 220, 10) + units(90, 91, 10)) * 1e-3
    memory = 1.0 + (150 + 220 + 91) * 1e-3
    assert compute > memory
    assert TIMER.seconds(rows) == pytest.approx(compute + 0.5 + 3 * 0.25)


def test_a_phantom_costs_what_a_real_row_costs():
    phantom, real = (row(kind, 64, 128) for kind in (SegmentKind.PHANTOM, SegmentKind.REAL))
    assert TIMER.seconds([phantom]) == TIMER.seconds([real])


def test_the_same_number_of_tokens_costs_more_further_back():
    front, tail = (TIMER.seconds([row(SegmentKind.PHANTOM, start, start + 1000)]) for start in (0, 9000))
    assert tail - front == pytest.approx(1000 * 9000 * 1e-3)


def test_devices_share_the_work_but_not_the_fixed_time():
    four = StepTimer(MODEL, DEVICE, num_devices=4)
    assert four.seconds([decode(500)]) == pytest.approx(1.501 / 4 + 0.75)
    assert four.move_seconds(3, 4) == pytest.approx(3 * 4 * 1000 * 1e-5 / 4 + 2.0)


def test_experts_that_no_token_chooses_are_not_read():
    moe = dataclasses.replace(MODEL, expert_bytes=8e6, num_experts=4, experts_per_token=1)
    assert moe.bytes_read(1) == pytest.approx(1e6 + 2e6)
    assert moe.bytes_read(2) == pytest.approx(1e6 + 8e6 * (1 - 0.75**2))
    assert moe.bytes_read(10_000) == pytest.approx(9e6)


@pytest.mark.parametrize("bad", [{"num_devices": 0}, {"scale": 0}])
def test_a_timer_needs_devices_and_a_scale(bad):
    with pytest.raises(ValueError, match="must be at least 1"):
        StepTimer(MODEL, DEVICE, **bad)


# Scale: a token stands for several.


def test_a_scaled_prefill_takes_the_time_of_the_unscaled_one():
    scaled = StepTimer(MODEL, DEVICE, scale=16)
    assert scaled.seconds([row(SegmentKind.REAL, 4, 20)]) == TIMER.seconds([row(SegmentKind.REAL, 64, 320)])


def test_a_scaled_decode_takes_the_time_of_its_steps():
    scaled = StepTimer(MODEL, DEVICE, scale=16)
    wanted = sum(TIMER.seconds([decode(160 + j), decode(320 + j, 1)]) for j in range(16))
    assert scaled.seconds([decode(10), decode(20, 1)]) == pytest.approx(wanted)
    assert scaled.decode_seconds(2, 480) == scaled.seconds([decode(10), decode(20, 1)])


def test_only_the_first_of_a_scaled_decodes_steps_has_the_prefill():
    scaled = StepTimer(MODEL, DEVICE, scale=4)
    wanted = TIMER.seconds([row(SegmentKind.REAL, 0, 64), decode(40, 1)])
    wanted += sum(TIMER.seconds([decode(40 + j, 1)]) for j in range(1, 4))
    assert scaled.seconds([row(SegmentKind.REAL, 0, 16), decode(10, 1)]) == pytest.approx(wanted)


@pytest.mark.parametrize("scale", [1, 2, 16, 64])
def test_units_of_scaled_positions_are_exact(scale):
    scaled_cost = scaled_linear_cost(23_552, scale)
    assert units(3, 11, scaled_cost) * scale**2 == pytest.approx(units(3 * scale, 11 * scale, 23_552), rel=1e-12)


@pytest.mark.parametrize("scale", [1, 4])
def test_load_units_are_the_links_time_in_units(scale):
    timer = StepTimer(MODEL, DEVICE, scale=scale)
    # 16 tokens of K/V by 1e5 bytes/s are 0.16 s, so 160 units.
    assert timer.load_units(16 // scale) * scale**2 == pytest.approx(160)


# Models and devices.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_model_costs_are_the_sizes_of_the_parameters(name):
    config = PRESETS[name]
    costs = model_costs(config, name)
    shapes = parameter_shapes(config)
    leaves = {path[-1].name: leaf for path, leaf in jax.tree.leaves_with_path(shapes)}
    sizes = {field: math.prod(leaf.shape) * leaf.dtype.itemsize for field, leaf in leaves.items()}
    experts = sum(size for field, size in sizes.items() if field.startswith("expert_"))
    head = sizes["embed"] if config.tied_embeddings else sizes["lm_head"]
    rest = sum(sizes.values()) - experts - sizes["embed"] - sizes.get("lm_head", 0)
    assert costs.expert_bytes == experts
    assert costs.weight_bytes == rest + head
    assert costs.linear_cost == config.linear_cost
    assert costs.unit_flops == 4 * config.num_heads * config.head_dim * config.num_layers


def test_a_page_of_qwen3_8b_has_nine_mebibytes():
    assert model_costs(PRESETS["qwen3-8b"], "qwen3-8b").kv_bytes_per_token * 64 == 9 * 2**20


def test_the_formula_of_figure_one():
    """30 % of a history freed from 2K or from the end, 512 tokens appended: 1.14 and 2.93 times, within 4 %."""
    timer = StepTimer(model_costs(PRESETS["qwen3-8b"], "qwen3-8b"), profile_named("h100"))

    def ratio(context):
        freed = round(0.3 * context)
        new = (context, context + 512)
        front = units(2048, 2048 + freed, 23_552) + units(*new, 23_552)
        tail = units(context - freed, context, 23_552) + units(*new, 23_552)
        spans = [(2048, 2048 + freed), new]
        seconds = timer.seconds([row(SegmentKind.REAL, *span) for span in spans])
        assert seconds == pytest.approx(front * timer.unit_s + timer.device.step_s + 2 * timer.device.segment_s)
        return tail / front

    assert ratio(8192) == pytest.approx(1.14, rel=0.04)
    assert ratio(131_072) == pytest.approx(2.93, rel=0.04)


def test_profiles_are_named_and_checked():
    assert set(PROFILES) == {"a100", "h100", "h200", "v5e", "v5p", "v6e", "toy"}
    assert profile_named("h100").flops == 494.7e12
    with pytest.raises(ValueError, match="unknown device 'h999'; known: a100, h100"):
        profile_named("h999")
    for name, value in (("peak_flops", 0.0), ("link_share", 1.5), ("memory_share", 0.0), ("step_s", -1.0)):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(DEVICE, **{name: value})


# The clock.


def test_steps_run_one_after_the_other_and_collecting_waits():
    run = executor()
    seconds = TIMER.seconds([decode(500)])
    first, second = run.dispatch(plan(decode(500))), run.dispatch(plan(decode(500), step=1))
    assert run.clock.now_s == 0.0
    assert run.collect(first).time_s == run.clock.now_s == seconds
    assert run.collect(second).time_s == run.clock.now_s == 2 * seconds
    run.clock.wait(10.0)
    third = run.dispatch(plan(decode(500), step=2))  # the device was idle
    run.collect(third)
    assert run.clock.now_s == 2 * seconds + 10.0 + seconds and run.busy_s == pytest.approx(3 * seconds)


def test_collecting_a_step_that_is_over_takes_no_time():
    run = executor()
    pending = run.dispatch(plan(decode(500)))
    run.clock.wait(100.0)
    assert run.collect(pending).time_s == pending.end_s < run.clock.now_s == 100.0


# Samples.


def test_samples_are_a_hash_of_session_and_position():
    names = {0: "a", 1: "b", 2: "a"}
    run = executor(vocab_size=97, session_of=names.__getitem__)
    tokens = run.dispatch(plan(decode(5, 0), decode(5, 1), decode(5, 2), decode(900, 2))).done.tokens
    assert tokens.dtype == np.int32 and tokens[0] == tokens[2] and tokens[0] != tokens[1]
    np.testing.assert_array_equal(tokens[[0, 3]], [run.tokens("a", 6, 7)[0], run.tokens("a", 901, 902)[0]])
    stretch = run.tokens("a", 200, 800)
    assert len(stretch) == 600 and 0 <= stretch.min() and stretch.max() < 97
    np.testing.assert_array_equal(stretch[100:101], run.tokens("a", 300, 301))
    assert len(set(stretch.tolist())) > 80
    assert len(run.tokens("a", 7, 7)) == 0


def test_scores_and_ranks_have_the_shapes_that_were_asked_for():
    targets = np.array([3, -1, 4], np.int32)
    scored = dataclasses.replace(row(SegmentKind.SCORE, 0, 3, sample=False), targets=targets)
    ranked = dataclasses.replace(decode(3), sample=SamplingParams(top_logprobs=2))
    done = executor().dispatch(plan(scored, ranked)).done
    np.testing.assert_array_equal(done.scores[0], np.array([-1, np.nan, -1], np.float32))
    assert done.top_tokens is not None and done.top_tokens.shape == (1, 2) and done.top_tokens[0, 0] == done.tokens[0]


# Moves: 4 tokens a page, 0.04 s of the link, and 2 s a move.


def move(move_id, kind, num_pages=10, **more):
    ids = np.arange(num_pages, dtype=np.int32)
    return Move(move_id=move_id, kind=kind, device_ids=ids, host_ids=ids, **more)


def test_moves_of_one_direction_queue_and_those_of_the_other_run_beside_them():
    run = executor()
    run.start_moves((move(0, MoveKind.LOAD), move(1, MoveKind.LOAD, 5), move(2, MoveKind.DEMOTE, request_id=-1)))
    spans = [(record.start_s, record.end_s) for record in run.moves]
    assert spans == [(0.0, pytest.approx(2.4)), (pytest.approx(2.4), pytest.approx(4.6)), (0.0, pytest.approx(2.4))]
    assert run.finish_moves() == ((), ())
    run.clock.wait(2.4)
    assert run.finish_moves() == ((0, 2), ())
    assert run.finish_moves() == ((), ())
    run.clock.wait(10.0)
    assert run.finish_moves() == ((1,), ())


def test_a_link_that_is_not_full_duplex_is_one_queue():
    run = executor(StepTimer(MODEL, dataclasses.replace(DEVICE, full_duplex=False)))
    run.start_moves((move(0, MoveKind.DEMOTE), move(1, MoveKind.LOAD)))
    assert run.moves[1].start_s == run.moves[0].end_s == pytest.approx(2.4)


def test_moves_do_not_hold_up_steps_and_a_demotion_waits_for_those_before_it():
    run = executor()
    pending = run.dispatch(plan(decode(500)))
    run.start_moves((move(0, MoveKind.LOAD), move(1, MoveKind.DEMOTE)))
    second = run.dispatch(plan(decode(500), step=1))
    assert run.moves[0].start_s == 0.0
    assert run.moves[1].start_s == pending.end_s  # gathered behind the step that was on its way
    assert second.end_s == 2 * pending.end_s


def test_waiting_for_moves_goes_on_to_the_next_that_ends():
    run = executor()
    run.start_moves((move(0, MoveKind.LOAD), move(1, MoveKind.LOAD)))
    assert run.next_move_s == pytest.approx(2.4)
    assert run.finish_moves(wait=True) == ((0,), ())
    assert run.clock.now_s == run.move_wait_s == pytest.approx(2.4)
    assert run.finish_moves(wait=True) == ((1,), ())
    assert run.clock.now_s == pytest.approx(4.8)
    assert run.finish_moves(wait=True) == ((), ()) and run.next_move_s == math.inf


def test_a_move_is_recorded():
    run = executor()
    run.start_moves((move(7, MoveKind.LOAD, 3, request_id=4, prefetch=True, num_swapped=2),))
    record = run.moves[0]
    assert (record.num_pages, record.num_swapped, record.prefetch, record.request_id) == (3, 2, True, 4)
    assert (record.asked_s, record.start_s, record.end_s) == (0.0, 0.0, pytest.approx(2.12))
