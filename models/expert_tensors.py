"""Where safetensors keep experts: a tensor each, or the experts of a layer in one, its axes in either order."""

import re
from collections.abc import Mapping

from penelope_jax.models import qwen3_moe
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.placement import Source, Sources


def expert_sources(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], prefix: str, where: str) -> Sources:
    """Returns where the experts of every layer are, as the names in the first of these layers tell.

    Args:
        config: a model with experts.
        shapes: of all stored tensors, by name.
        prefix: of a layer's tensors with `{}` for its number.
        where: what to name in errors.

    Raises:
        ValueError: the files hold another number of experts than the configuration says.
    """
    layers = [i for i in range(config.num_layers) if config.has_experts(i)]
    first = prefix.format(layers[0])
    fused = [shapes.get(first + name) for name in (qwen3_moe.HF_FUSED_GATE_UP, qwen3_moe.HF_FUSED_DOWN)]
    if any(fused):
        return _fused(config, fused, [prefix.format(i) for i in layers], layers)
    pattern = re.compile(re.escape(first) + r"mlp\.experts\.(\d+)\.")
    found = len({match[1] for match in map(pattern.match, shapes) if match})
    if found != config.num_experts:
        raise ValueError(
            f"{where}: layer {layers[0]} has {found} experts; the configuration says num_experts={config.num_experts}."
        )
    into, out_of = (config.expert_size, config.hidden_size), (config.hidden_size, config.expert_size)
    return {
        field: {
            (i, expert): Source(
                name=prefix.format(i) + name.format(expert),
                shape=out_of if field == "expert_down_proj" else into,
                place=(i, expert),
                transposed=True,
            )
            for i in layers
            for expert in range(config.num_experts)
        }
        for field, name in qwen3_moe.HF_EXPERT_TENSORS.items()
    }


def _fused(config: ModelConfig, found: list[tuple[int, ...] | None], prefixes: list[str], layers: list[int]) -> Sources:
    num_experts, width, size = config.num_experts, config.hidden_size, config.expert_size
    gate_up, down = (num_experts, width, 2 * size), (num_experts, size, width)  # [E, in, out], as parameters are
    # The two matrices cannot both be square, so the shapes tell the order of their axes.
    transposed = found != [gate_up, down]
    if transposed:
        gate_up, down = ((shape[0], shape[2], shape[1]) for shape in (gate_up, down))

    def sources(name: str, shape: tuple[int, ...], start: int = 0) -> dict[tuple[int, ...], Source]:
        return {
            (i,): Source(name=prefix + name, shape=shape, place=(i,), transposed=transposed, start=start)
            for i, prefix in zip(layers, prefixes, strict=True)
        }

    return {
        "expert_gate_proj": sources(qwen3_moe.HF_FUSED_GATE_UP, gate_up),
        "expert_up_proj": sources(qwen3_moe.HF_FUSED_GATE_UP, gate_up, start=size),
        "expert_down_proj": sources(qwen3_moe.HF_FUSED_DOWN, down),
    }
