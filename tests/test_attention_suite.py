"""One suite for all attention implementations, the kernels in their interpreters.

Errors are a row's and head's against float64. Controls show that the tolerance sees a swapped K and V, a wrong page and
a mask that is off by one. What is particular to a kernel is in the tests named after it.
"""

import dataclasses

import numpy as np
import pytest
from attention_world import (
    CONTROLS,
    TOLERANCE,
    Case,
    Shape,
    check,
    make_case,
    mixed_case,
    run,
    worst_row,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.kernels.paged_attention import IMPLEMENTATIONS, KERNELS

# The Mosaic GPU interpreter multiplies rows that were not loaded; what stands in them is left out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

# Each implementation is shown every group size; kernels take larger heads than plain XLA needs.
PLAIN_SHAPES = {
    "group1-page4-f32": Shape(4, 4, 8, 4, 8, "float32"),
    "group4-page16-f32": Shape(8, 2, 16, 16, 4, "float32"),
    "group8-page64-f32": Shape(8, 1, 8, 64, 16, "float32"),
    "group16-page16": Shape(32, 2, 32, 16, 8),
}
KERNEL_SHAPES = {
    "group1-page128": Shape(2, 2, 128, 128, 16),
    "group4-page64": Shape(4, 1, 128, 64, 32),
    "group8-page16": Shape(16, 2, 128, 16, 2),
    "group16-page32-f32": Shape(16, 1, 128, 32, 1, "float32"),
}
SHAPES = PLAIN_SHAPES | KERNEL_SHAPES
GPU_SHAPE = Shape(4, 1, 64, 64, 2, deterministic=True)


def runs() -> list:
    """Returns pairs of an implementation and a shape that it takes."""
    pairs = [(implementation, name) for implementation in IMPLEMENTATIONS for name in PLAIN_SHAPES]
    pairs += [("tpu", name) for name in KERNEL_SHAPES]
    # Half a minute each: the default tests give this kernel smaller cases.
    slow = [("gpu", name) for name, shape in KERNEL_SHAPES.items() if shape.dtype != "float32"]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs] + [
        pytest.param(*pair, id="-".join(pair), marks=pytest.mark.slow) for pair in slow
    ]


def small_case(shape: Shape) -> Case:
    return make_case(shape, {0: [(40, 42)], 1: [(shape.page_size - 1, shape.page_size)]})


def a_case(implementation: str) -> Case:
    """Returns a step that an implementation takes, small where the interpreter is slow."""
    if implementation == "gpu":
        return small_case(GPU_SHAPE)
    return mixed_case(SHAPES["group4-page64" if implementation in KERNELS else "group4-page16-f32"])


@pytest.mark.parametrize(("implementation", "name"), runs())
def test_attention_matches_the_oracle(monkeypatch, implementation, name):
    if implementation == "gpu":  # without race detection: it compares each access with all before
        plain = plgpu.InterpretGPUParams()
        monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda **_: plain)
    case = mixed_case(SHAPES[name])
    out = check(implementation, case)
    if implementation != "gpu":  # for the time it takes
        np.testing.assert_array_equal(out, run(implementation, case))


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    ("implementation", "name"), [pair for pair in runs() if pair.values[0] != "gpu"] + [("gpu", "small")]
)
def test_control_a_wrong_kernel_fails(implementation, name, control):
    case = small_case(GPU_SHAPE) if name == "small" else mixed_case(SHAPES[name])
    out = run(implementation, control(case))
    assert worst_row(case, out) > 4 * TOLERANCE[case.shape.dtype]


def test_the_small_case_of_controls_matches_the_oracle():
    check("gpu", small_case(GPU_SHAPE))


@pytest.mark.parametrize("page_id", [-1, DROP_PAGE])
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, *KERNELS])
def test_a_page_that_is_none_reads_as_nan(implementation, page_id):
    """And as nothing else: rows that do not need it are as they were."""
    case, page = a_case(implementation), 0 if implementation == "gpu" else 2
    before = run(implementation, case)
    table = case.page_table.copy()
    table[0, page] = page_id
    out = run(implementation, dataclasses.replace(case, page_table=table))
    spoilt = np.array([history == 0 and position >= page * case.shape.page_size for history, position in case.rows])
    assert spoilt.any()
    assert np.isnan(out[: len(case.rows)][spoilt]).all()
    np.testing.assert_array_equal(out[: len(case.rows)][~spoilt], before[: len(case.rows)][~spoilt])


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, *KERNELS])
def test_no_rows(implementation):
    case = a_case(implementation)
    assert not run(implementation, dataclasses.replace(case, tiles=np.zeros_like(case.tiles))).any()


@pytest.mark.parametrize("implementation", ["cpu", *KERNELS])
def test_rows_of_a_hole_equal_those_of_the_whole_prompt(implementation):
    """Bit by bit: a refilled hole in tiles that start elsewhere, and a decode in a small tile."""
    shape = Shape(4, 1, 64 if implementation == "gpu" else 128, 64, 32, deterministic=True)
    length = 193 if implementation == "gpu" else 705  # of few steps, and across a border of steps
    case = make_case(shape, {0: [(0, length)]})
    whole = run(implementation, case)

    def again(q_tile: int, first: int, stop: int) -> np.ndarray:
        tiles = np.zeros_like(case.tiles)
        starts = range(first, stop, q_tile)
        tiles[: len(starts)] = [(0, row, row, min(q_tile, stop - row)) for row in starts]
        other = dataclasses.replace(case, shape=dataclasses.replace(shape, q_tile=q_tile), tiles=tiles)
        return run(implementation, other)[first:stop]

    np.testing.assert_array_equal(again(32, 56, 128), whole[56:128])
    np.testing.assert_array_equal(again(32, length - 100, length), whole[length - 100 : length])
    np.testing.assert_array_equal(again(2, length - 1, length), whole[length - 1 : length])


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "tpu"])
def test_a_table_of_one_page(implementation):
    case = make_case(Shape(4, 1, 128, 16, 16), {0: [(3, 16)]})
    check(implementation, dataclasses.replace(case, page_table=case.page_table[:, :1]))


def test_a_history_of_thousands_of_pages():
    """A decode at its end and a hole in it."""
    case = make_case(Shape(4, 1, 128, 16, 2), {0: [(32_000, 32_002), (4000 * 16 - 5, 4000 * 16 - 4)]})
    for implementation in (*IMPLEMENTATIONS, "tpu"):
        check(implementation, case)
