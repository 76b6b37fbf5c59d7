"""A model's shape as the numbers of the cost model of steps."""

from penelope_jax.models.config import ModelConfig
from penelope_jax.step_time import ModelCosts

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def model_costs(config: ModelConfig, name: str) -> ModelCosts:
    """Returns what `step_time.py` wants to know of a model: sizes of weights and K/V, and units of its linear work."""
    size = _ITEM_BYTES[config.dtype]
    d, h = config.hidden_size, config.head_dim
    num_kv_heads = config.num_kv_heads // config.kv_head_copies
    attention = 2 * d * h * (config.num_heads + num_kv_heads) + 2 * d  # four projections, two norms
    attention += 2 * h * config.qk_norm
    attention += h * (config.num_heads + 2 * num_kv_heads) * config.attention_bias + d * config.attention_bias
    num_dense = len(config.dense_layers) if config.num_experts else config.num_layers
    num_with_experts = config.num_layers - num_dense
    weights = config.num_layers * attention + num_dense * 3 * d * config.mlp_size
    weights += num_with_experts * d * config.num_experts  # routers
    weights += d + config.vocab_size * d  # the last norm and the head; of the embedding table only few rows are read
    return ModelCosts(
        name=name,
        linear_cost=config.linear_cost,
        unit_flops=4 * config.num_heads * h * config.num_layers,
        weight_bytes=size * weights,
        expert_bytes=size * num_with_experts * config.num_experts * 3 * d * config.expert_size,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        kv_bytes_per_token=2 * size * config.num_layers * num_kv_heads * h,
    )
