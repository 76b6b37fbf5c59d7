"""Arguments of attention, sizes of its tiles, and the page writes. Attention itself: `test_attention_suite.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penelope_jax.kernels import paged_attention, q_tiles
from penelope_jax.kernels.kv_write import DROP_PAGE, write_kv
from penelope_jax.kernels.paged_attention import ragged_paged_attention

NUM_LAYERS, LAYER = 2, 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "gpu2"}, "implementation='gpu2' cannot run here; what can: cpu"),
        ({"implementation": "reference", "interpret": True}, "interpret=True needs a Pallas implementation"),
        ({"q": (7, 4)}, r"q has shape \(7, 4\); supported: \[T, N, H\]"),
        ({"q": (7, 5, 8)}, "q has 5 heads; supported: multiples of kv_pool's 2 kv heads"),
        ({"q": (7, 4, 16)}, "q has head dim 16 and kv_pool has 8"),
        ({"q": (7, 4, 8), "dtype": "int32"}, "q has dtype int32; supported: float32, bfloat16"),
        ({"kv_pool": (3, 2, 2, 8)}, r"kv_pool has shape \(3, 2, 2, 8\)"),
        ({"kv_pool": (3, 1, 2, 2, 12, 8)}, "kv_pool has page_size=12; supported: powers of two"),
        ({"tiles": (5, 3)}, r"tiles is int32\[5, 3\]; supported: int32\[num_tiles, 4\]"),
        ({"page_table": (5,)}, r"page_table is int32\[5\]; supported: int32\[S, max_pages\]"),
        ({"q_tile": 0}, "q_tile=0; supported: integers of at least 1"),
        ({"scale": 0.0}, "scale=0.0; supported: positive numbers"),
    ],
)
def test_arguments_are_checked_while_tracing(change, message):
    def zeros(name, default, dtype=np.float32):
        return jax.ShapeDtypeStruct(change.get(name, default), dtype)

    arrays = (
        zeros("q", (7, 4, 8), change.get("dtype", np.float32)),
        zeros("kv_pool", (3, 1, 2, 2, 16, 8)),
        zeros("layer", (), np.int32),
        zeros("tiles", (5, 4), np.int32),
        zeros("page_table", (2, 3), np.int32),
    )
    options = {"q_tile": 4, "scale": 1.0} | {
        name: value for name, value in change.items() if name in ("q_tile", "scale", "implementation", "interpret")
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(ragged_paged_attention, **options), *arrays)


def test_tile_sizes():
    assert [q_tiles.prefill_q_tile(heads, 2) for heads in (2, 4, 8, 18, 32)] == [128, 128, 64, 32, 32]
    assert [q_tiles.decode_q_tile(heads, 2) for heads in (2, 4, 8, 18, 32)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_changes_the_named_slots_only(dtype):
    num_pages, num_kv_heads, size, head_dim, num_rows = 6, 2, 4, 8, 9
    random = np.random.default_rng(0)
    pool = random.standard_normal((num_pages, NUM_LAYERS, 2, num_kv_heads, size, head_dim)).astype(dtype)
    keys, values = (random.standard_normal((num_rows, num_kv_heads, head_dim)).astype(dtype) for _ in range(2))
    pages = np.array([4, DROP_PAGE, 0, 5, num_pages, -3], np.int32)
    source = np.array([[0, 1, 2, 3], [8] * 4, [-1, -1, 4, 5], [7, -1, -1, -1], [6] * 4, [6] * 4], np.int32)
    expected = pool.copy()
    for page, rows in zip(pages, source, strict=True):
        for slot, row in enumerate(rows):
            if 0 <= page < num_pages and row >= 0:
                expected[page, LAYER, 0, :, slot] = keys[row]
                expected[page, LAYER, 1, :, slot] = values[row]
    written = jax.jit(write_kv, donate_argnums=0)(jnp.array(pool), LAYER, keys, values, pages, source)
    np.testing.assert_array_equal(np.asarray(written), expected)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "page_size", "dtype", "expected"),
    [
        ("gpu", 128, 64, "bfloat16", "gpu"),
        ("gpu", 64, 16, "float16", "gpu"),
        ("gpu", 128, 64, "float32", "cpu"),
        ("gpu", 96, 64, "bfloat16", "cpu"),
        ("gpu", 128, 8, "bfloat16", "cpu"),
        ("tpu", 128, 64, "float32", "tpu"),
        ("tpu", 64, 64, "bfloat16", "cpu"),
        ("tpu", 128, 64, "float16", "cpu"),
        ("", 128, 64, "bfloat16", "cpu"),
    ],
)
def test_where_the_devices_kernel_does_not_take_the_pool_xla_runs(
    monkeypatch, kernel, head_dim, page_size, dtype, expected
):
    monkeypatch.setattr(paged_attention, "_has_device", lambda name: name == kernel)
    sizes = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    assert paged_attention.fitting_implementation(None, **sizes) == expected
    if kernel:  # what is named is not second-guessed: the kernel itself says what it does not take
        assert paged_attention.fitting_implementation(kernel, **sizes) == kernel
