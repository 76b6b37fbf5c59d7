"""Qwen3-MoE: what differs from dense Qwen3: some or all layers have experts in place of the MLP.

A layer is dense when `mlp_only_layers` names it or `decoder_sparse_step` does not divide its number counted from one.
"""

from collections.abc import Collection

from penelope_jax.models import qwen3

MODEL_TYPE = "qwen3_moe"
HF_CLASS = "Qwen3MoeForCausalLM"
QK_NORM = True
DEFAULT_ROPE_THETA = 10000.0

HF_LAYER_TENSORS = qwen3.HF_LAYER_TENSORS | {"router": "mlp.gate.weight"}

# Field of LayerParams -> name below `model.layers.{i}.`, of each expert, or of all experts of the layer in one.
HF_EXPERT_TENSORS = {
    "expert_gate_proj": "mlp.experts.{}.gate_proj.weight",
    "expert_up_proj": "mlp.experts.{}.up_proj.weight",
    "expert_down_proj": "mlp.experts.{}.down_proj.weight",
}
HF_FUSED_GATE_UP = "mlp.experts.gate_up_proj"  # gates, then ups
HF_FUSED_DOWN = "mlp.experts.down_proj"


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """Head width when the configuration does not name it."""
    return hidden_size // num_heads


def dense_layers(num_layers: int, mlp_only_layers: Collection[int], decoder_sparse_step: int) -> tuple[int, ...]:
    """Returns the numbers of the layers without experts."""
    return tuple(i for i in range(num_layers) if i in mlp_only_layers or (i + 1) % decoder_sparse_step)
