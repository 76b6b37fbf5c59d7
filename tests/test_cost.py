"""The paper's cost formula, against sums written out."""

import pytest

from penelope_jax import cost

QWEN3_8B = 23_552.0


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (5, 5), (0, 100), (37, 38), (1000, 1064)])
@pytest.mark.parametrize("linear_cost", [0.0, 7.5, QWEN3_8B])
def test_units_are_the_sum_of_c_plus_position(start: int, stop: int, linear_cost: float):
    assert cost.units(start, stop, linear_cost) == sum(linear_cost + position for position in range(start, stop))


def test_units_of_spans_add_up():
    assert cost.units_of([(0, 4), (8, 10)], 1.0) == (4 + 6) + (2 + 17)
    assert cost.units_of([], 1.0) == 0.0


@pytest.mark.parametrize(("num_tokens", "measured"), [(8_192, 1.14), (131_072, 2.93)])
def test_front_against_tail_is_what_the_paper_measured(num_tokens: int, measured: float):
    """Figure 1: 30 % freed from position 2K or from the end, 512 tokens appended, Qwen3-8B; within 4 %."""
    freed = round(0.3 * num_tokens / 64) * 64
    new = cost.units(num_tokens, num_tokens + 512, QWEN3_8B)
    front = new + cost.units(2_048, 2_048 + freed, QWEN3_8B)
    tail = new + cost.units(num_tokens - freed, num_tokens, QWEN3_8B)
    assert tail / front == pytest.approx(measured, rel=0.04)


def test_calibration_finds_the_linear_cost_of_a_device():
    for linear_cost in (0.0, 100.0, QWEN3_8B):
        seconds = [3e-9 * cost.units(0, length, linear_cost) for length in (4_096, 32_768)]
        found = cost.calibrate_linear_cost(4_096, seconds[0], 32_768, seconds[1])
        assert found == pytest.approx(linear_cost, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 1.0, 100, 2.0), "two different lengths of at least 1 are needed, got 100 and 100."),
        ((0, 1.0, 100, 2.0), "two different lengths of at least 1 are needed, got 0 and 100."),
        ((100, 0.0, 200, 2.0), "times must be positive, got 0.0 and 2.0 s."),
        (
            (100, 1.0, 200, 2.0),
            "no linear cost explains 1.0 s for 100 and 2.0 s for 200 tokens; measure longer prompts.",
        ),
        (
            (100, 1.0, 200, 9.0),
            "no linear cost explains 1.0 s for 100 and 9.0 s for 200 tokens; measure longer prompts.",
        ),
    ],
)
def test_times_that_no_linear_cost_explains_are_an_error(arguments: tuple[int, float, int, float], message: str):
    with pytest.raises(ValueError) as caught:
        cost.calibrate_linear_cost(*arguments)
    assert str(caught.value) == message
