"""Qwen3 (dense): what differs from the shared decoder of `layers.py`.

Each query and key head is normalised (RMSNorm over H) before RoPE, and the head width is named by the configuration,
independent of D / N. The rest, tensor names included, is Llama's. GGUF keeps the row order of the original.
"""

import numpy as np

from penelope_jax.models import llama

MODEL_TYPE = "qwen3"
HF_CLASS = "Qwen3ForCausalLM"
QK_NORM = True
DEFAULT_ROPE_THETA = 10000.0

HF_LAYER_TENSORS = llama.HF_LAYER_TENSORS | {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
GGUF_LAYER_TENSORS = llama.GGUF_LAYER_TENSORS | {
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """Head width when the configuration does not name it."""
    del hidden_size, num_heads
    return 128


def restore_gguf_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps this architecture's query and key rows as they are."""
    del num_heads
    return rows
