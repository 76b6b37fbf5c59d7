"""Layers of experts: against numpy in float64, bit by bit in other company, over meshes, and in the whole step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import cpu_mesh, dense_logits, numpy_logits, params_of, swap, with_layers
from step_world import DRAWN, GREEDY, History, bits, plan, poison

from penelope_jax.executor import JaxExecutor
from penelope_jax.models import layers, moe, random_weights
from penelope_jax.models.config import ModelConfig
from penelope_jax.segments import SegmentKind

MOE = random_weights.PRESETS["tiny-moe"]
PLAIN = dataclasses.replace(MOE, renormalize_experts=False, experts_per_token=3, num_experts=6)
MIXED = dataclasses.replace(MOE, num_layers=3, dense_layers=(1,))
TOKENS = np.random.default_rng(0).integers(0, 256, 60).astype(np.int32)


@pytest.mark.parametrize("config", [MOE, PLAIN, MIXED], ids=["renormalized", "plain", "mixed"])
def test_logits_equal_numpy_in_float64(config):
    params = params_of(config)
    expected = numpy_logits(config, params, TOKENS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(dense_logits(config, params, TOKENS), expected, rtol=0, atol=1e-4)


def other_experts(params):
    """Gives each expert's down projection to its neighbour."""
    return with_layers(params, expert_down_proj=jnp.roll(params.layers.expert_down_proj, 1, axis=1))


def other_kind(params):
    return with_layers(params, has_experts=~params.layers.has_experts)


@pytest.mark.parametrize(
    ("config", "wrong_config", "wrong_params"),
    [
        (MOE, dataclasses.replace(MOE, renormalize_experts=False), lambda params: params),
        (MOE, dataclasses.replace(MOE, experts_per_token=1), lambda params: params),
        (MOE, MOE, other_experts),
        (MOE, MOE, lambda params: swap(params, "expert_gate_proj", "expert_up_proj")),
        (MOE, MOE, lambda params: with_layers(params, router=params.layers.router[..., ::-1])),
        (MIXED, MIXED, other_kind),
    ],
    ids=["renormalize", "top-1", "experts", "gate-up", "router", "kind"],
)
def test_numpy_comparison_can_fail(config, wrong_config, wrong_params):
    params = params_of(config)
    right = dense_logits(config, params, TOKENS)
    wrong = dense_logits(wrong_config, wrong_params(params), TOKENS)
    assert np.abs(right - wrong).max() > 100 * 1e-4


def test_tiles_follow_the_mean_number_of_rows():
    assert moe.tile_rows(128, 128, 8) == 16
    assert moe.tile_rows(128, 16, 4) == 32
    assert moe.tile_rows(100, 8, 4) == 64
    assert moe.tile_rows(4096, 128, 8) == 128


# Row by row


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of experts: T = 128 rows, k = 4 of E experts."""

    num_experts: int
    hidden_size: int
    expert_size: int
    dtype: str

    def parameters(self) -> list[jax.Array]:
        random = np.random.default_rng(self.num_experts)
        e, d, i = self.num_experts, self.hidden_size, self.expert_size
        drawn = [
            random.standard_normal(shape) / np.sqrt(shape[-2]) for shape in ((d, e), (e, d, i), (e, d, i), (e, i, d))
        ]
        return [jnp.asarray(leaf, self.dtype) for leaf in drawn]

    def rows(self, num_rows: int, seed: int) -> np.ndarray:
        drawn = np.random.default_rng(seed).standard_normal((num_rows, self.hidden_size))
        return np.asarray(jnp.asarray(drawn, self.dtype))


@jax.jit
def run_layer(x, router, gate, up, down):
    return moe.mix_experts(x, *moe.route(x, router, 4, True), gate, up, down)


@jax.jit
def popular_first(x, router, gate, up, down):
    """The same sums, but in an order that depends on the other rows: the experts with the most rows come first."""
    weights, experts = moe.route(x, router, 4, True)
    order = jnp.argsort(-jnp.bincount(experts.reshape(-1), length=router.shape[1]))
    rank = jnp.argsort(order).astype(jnp.int32)
    return moe.mix_experts(x, weights, rank[experts], gate[order], up[order], down[order])


def company(layer: Layer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns batches that hold the first 40 of some rows, and where: alone, moved, and beside others."""
    rows, others = layer.rows(128, 1)[:40], layer.rows(128, 2)
    random = np.random.default_rng(3)
    batches = []
    for background in (np.zeros_like(others), others, np.repeat(rows[7:8], 128, axis=0)):
        for places in (np.arange(40), np.arange(88, 128), random.permutation(128)[:40]):
            batch = background.copy()
            batch[places] = rows
            batches.append((batch, places))
    return batches


LAYERS = [Layer(8, 64, 32, "float32"), Layer(8, 64, 32, "bfloat16"), Layer(64, 100, 24, "float32")]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.num_experts}x{layer.hidden_size}-{layer.dtype}")
def test_a_row_does_not_depend_on_the_rows_beside_it(layer):
    parameters = layer.parameters()
    results = [np.asarray(run_layer(batch, *parameters))[places] for batch, places in company(layer)]
    assert np.abs(results[0]).mean() > 0.05
    for result in results[1:]:
        np.testing.assert_array_equal(bits(result), bits(results[0]))


@pytest.mark.parametrize("layer", LAYERS[:2], ids=["float32", "bfloat16"])
def test_control_an_order_by_popularity_shows(layer):
    parameters = layer.parameters()
    results = [np.asarray(popular_first(batch, *parameters))[places] for batch, places in company(layer)]
    np.testing.assert_allclose(results[-1], results[0], rtol=0, atol=1e-5)
    assert any((bits(result) != bits(results[0])).any() for result in results[1:])


def test_rows_of_zeros_stay_zero_and_nan_stays_in_its_row():
    layer = LAYERS[0]
    parameters = layer.parameters()
    batch = np.array(layer.rows(128, 1))
    clean = np.asarray(run_layer(batch, *parameters))
    batch[5], batch[9] = 0, np.nan
    result = np.asarray(run_layer(batch, *parameters))
    assert (bits(result[5]) == 0).all()
    assert np.isnan(result[9]).all()
    others = np.setdiff1d(np.arange(128), [5, 9])
    np.testing.assert_array_equal(bits(result[others]), bits(clean[others]))


def test_every_row_may_want_the_same_expert():
    """Nothing is dropped: 128 rows of one expert, in tiles of 64."""
    layer = LAYERS[0]
    _, gate, up, down = layer.parameters()
    x = layer.rows(128, 1)
    experts = jnp.full((128, 1), 3, jnp.int32)
    result = jax.jit(moe.mix_experts)(x, jnp.full((128, 1), 0.5), experts, gate, up, down)
    hidden = np.asarray(x @ gate[3], np.float64)
    expected = 0.5 * (hidden / (1 + np.exp(-hidden)) * np.asarray(x @ up[3])) @ np.asarray(down[3])
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


# Over meshes


@pytest.mark.parametrize(
    ("config", "data", "tensor"),
    [(MOE, 4, 1), (MOE, 1, 4), (MIXED, 2, 2)],
    ids=["experts-over-data", "heads-copied", "mixed-over-both"],
)
def test_a_mesh_gives_the_same_logits(config, data, tensor):
    """With tensor = 4 each of the two kv heads is there twice."""
    mesh = cpu_mesh(data, tensor)
    spread = layers.config_on_mesh(config, mesh)
    assert (spread.num_kv_heads, spread.kv_head_copies) == (max(2, tensor), max(1, tensor // 2))
    assert spread.linear_cost == config.linear_cost
    params = params_of(spread, mesh)
    shards = params.layers.expert_up_proj.addressable_shards
    assert {shard.data.shape for shard in shards} == {(config.num_layers, 2, 64, 32)}
    first = dense_logits(spread, params, TOKENS)
    np.testing.assert_allclose(first, dense_logits(config, params_of(config), TOKENS), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(bits(np.asarray(first)), bits(np.asarray(dense_logits(spread, params, TOKENS))))


def test_experts_are_not_gathered_on_a_mesh():
    mesh = cpu_mesh(2, 2)
    text = dense_logits.lower(MOE, params_of(MOE, mesh), TOKENS).compile().as_text()
    gathered = [line for line in text.splitlines() if "all-gather" in line and "8,64,32" in line]
    assert "all-reduce" in text
    assert not gathered


def params_values(config: ModelConfig, data: int, tensor: int) -> layers.Params:
    mesh = cpu_mesh(data, tensor)
    return jax.tree.map(np.asarray, params_of(layers.config_on_mesh(config, mesh), mesh))


def test_random_parameters_do_not_depend_on_the_mesh():
    config = dataclasses.replace(MIXED, attention_bias=True)
    one, four = params_values(config, 1, 1), params_values(config, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, one, four)
    copied = params_values(config, 1, 4)
    for field in ("k_proj", "v_proj", "k_bias", "v_bias"):
        stored, spread = getattr(one.layers, field), getattr(copied.layers, field)
        heads = stored.reshape(*stored.shape[:-1], 2, 16)
        np.testing.assert_array_equal(spread.reshape(*stored.shape[:-1], 4, 16), heads[..., [0, 0, 1, 1], :])


# In the step


@functools.cache
def executor_of(config: ModelConfig, data: int, tensor: int, rows: int, deterministic: bool = True) -> JaxExecutor:
    mesh = cpu_mesh(data, tensor)
    config = layers.config_on_mesh(config, mesh)
    return JaxExecutor(
        config,
        params_of(config, mesh),
        num_pages=40,
        page_size=16,
        max_context=512,
        max_segments=4,
        max_step_tokens=rows,
        token_buckets=(rows,),
        deterministic=deterministic,
        scoring=True,
    )


def history_and_other() -> tuple[History, History]:
    random = np.random.default_rng(1)
    ids = random.permutation(40)
    history = History(random.integers(0, 256, 301), ids[:20], scored=True)
    return history, History(random.integers(0, 256, 200), ids[20:33], request_id=1, scored=True)


@pytest.mark.parametrize(
    ("dtype", "data", "tensor"),
    [pytest.param("float32", 1, 1, marks=pytest.mark.slow), ("bfloat16", 1, 1), ("float32", 2, 2)],
)
def test_refilled_holes_have_the_first_bits(dtype, data, tensor):
    """A hole recomputed beside others over NaN, and a decode, equal one computation of the whole, bit for bit."""
    config = dataclasses.replace(MIXED if dtype == "float32" else MOE, dtype=dtype)
    history, other = history_and_other()
    executor = executor_of(config, data, tensor, 384)
    poison(executor, np.arange(40))
    done = executor.run(plan(history.segment(0, 301, sample=DRAWN)))
    expected = executor.read_pages(history.pages[:18])
    poison(executor, np.arange(40))
    executor.run(plan(other.segment(0, 48), history.segment(0, 160)))
    executor.run(plan(history.segment(160, 288)))
    poison(executor, history.pages[2:7])
    hole = history.segment(32, 112, SegmentKind.PHANTOM)
    again = executor.run(plan(other.segment(48, 90, sample=GREEDY), history.segment(288, 300), hole))
    np.testing.assert_array_equal(bits(executor.read_pages(history.pages[:18])), bits(expected))
    np.testing.assert_array_equal(bits(again.scores[1]), bits(done.scores[0][288:300]))
    last = executor.run(plan(history.segment(300, 301, SegmentKind.DECODE, sample=DRAWN)))
    assert last.tokens[0] == done.tokens[0]
    np.testing.assert_array_equal(bits(last.logprobs), bits(done.logprobs))
    executor.flip_bit(int(history.pages[3]))
    assert (bits(executor.read_pages(history.pages[:18])) != bits(expected)).sum() == 1


@pytest.mark.parametrize(("data", "tensor"), [pytest.param(2, 2, marks=pytest.mark.slow), (1, 4)])
def test_the_step_on_a_mesh_scores_as_on_one_device(data, tensor):
    history, _ = history_and_other()
    logprobs = np.asarray(jax.nn.log_softmax(dense_logits(MOE, params_of(MOE), history.tokens)))
    expected = np.take_along_axis(logprobs[:-1], history.tokens[1:, None], axis=-1)[:, 0]
    four = executor_of(MOE, data, tensor, 320, False)
    got = four.run(plan(history.segment(0, 301, sample=GREEDY)))
    assert np.diff(np.sort(logprobs[-1])[-2:]) > 1e-3
    assert got.tokens.tolist() == [logprobs[-1].argmax()]
    np.testing.assert_allclose(got.scores[0][:300], expected, rtol=0, atol=2e-5)
    again = four.run(plan(history.segment(0, 301, sample=GREEDY)))
    np.testing.assert_array_equal(bits(again.scores[0]), bits(got.scores[0]))
