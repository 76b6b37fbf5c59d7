"""Llama: what differs from the shared decoder of `layers.py`.

The plain case: no norm on heads, head width = D / N unless the file says otherwise. Llama 3.1 and later stretch the
rotary frequencies (`llama3`), and GGUF files store this architecture's query and key rows in another order.
"""

import math

import numpy as np

MODEL_TYPE = "llama"
HF_CLASS = "LlamaForCausalLM"
QK_NORM = False
DEFAULT_ROPE_THETA = 10000.0

# Field of LayerParams -> name below `model.layers.{i}.`
HF_LAYER_TENSORS = {
    "attention_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}

# Field of LayerParams -> name below `blk.{i}.`
GGUF_LAYER_TENSORS = {
    "attention_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """Head width when the configuration does not name it."""
    return hidden_size // num_heads


def stretch_frequencies(
    frequencies: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_context: int,
) -> np.ndarray:
    """Applies Llama 3's rule: slow waves are slowed by `factor`, fast ones kept, a linear ramp between.

    Args:
        frequencies: f64[H / 2], radians per position.
        factor: what the slow waves are divided by.
        low_freq_factor: a wave that turns fewer times within the original context is slow.
        high_freq_factor: a wave that turns more often is fast.
        original_max_context: positions the model was first trained on.

    Returns:
        f64[H / 2].
    """
    turns = original_max_context * frequencies / (2 * math.pi)  # of each wave within the original context
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / factor)


def restore_gguf_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of GGUF query and key tensors.

    GGUF pairs neighbouring rows for RoPE; this package (and the original checkpoints) pair row i with row i + H / 2.

    Args:
        rows: [heads * H, ...], a weight or a bias.
        num_heads: heads in it.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
