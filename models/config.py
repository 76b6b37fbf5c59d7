"""What a decoder is made of, and how a Hugging Face `config.json` says so.

`ModelConfig` is a hashable value: a static argument of the jitted step. Reading a configuration decides what this
version can run; what it cannot is refused with the reason. Front eviction frees the tokens that are cheapest to
recompute because every later query must attend to them, so its gain needs full causal attention in every layer (the
paper's stated limits): sliding-window and linear attention are refused, not approximated.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from penelope_jax.models import llama, qwen3, qwen3_moe

DTYPES = ("float32", "bfloat16")

_ARCHITECTURES = {module.MODEL_TYPE: module for module in (qwen3, llama, qwen3_moe)}
_NUM_EXPERTS = ("num_experts", "num_local_experts")  # published files and newer versions of transformers
_FULL_ATTENTION_ONLY = "front eviction gains by position, which needs full causal attention in every layer"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """A change of the rotary frequencies.

    Attributes:
        kind: `linear` (positions divided by `factor`), `llama3` and `yarn` (low frequencies divided, high ones kept, a
            ramp between) or `factors` (each frequency divided by its own number, as GGUF files store `llama3`).
        factor: by how much the context is stretched.
        low_freq_factor, high_freq_factor: `llama3`: where the ramp lies, in wavelengths per original context.
        original_max_context: `llama3`, `yarn`: the context the model was first trained on.
        frequency_factors: `factors`: H / 2 divisors.
        attention_factor: `yarn`: what queries and keys are multiplied by; None for 0.1 ln(factor) + 1.
        beta_fast, beta_slow: `yarn`: where the ramp lies, in wavelengths per original context.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    frequency_factors: tuple[float, ...] = ()
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "factors", "yarn"):
            raise ValueError(f"rope scaling kind={self.kind!r} must be linear, llama3, factors or yarn.")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor={self.factor} must be positive.")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"rope scaling {self.low_freq_factor=} must be below {self.high_freq_factor=}.")
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"rope scaling {self.beta_slow=} must be positive and below {self.beta_fast=}.")

    @property
    def yarn_attention_factor(self) -> float:
        """What YaRN multiplies rotated queries and keys by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder; letters of the design in brackets.

    Attributes:
        architecture: `qwen3`, `qwen3_moe` or `llama`.
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim: [V], [D], [L], [N], [K], [H].
        mlp_size: width of the gated MLP; of a model with experts, that of its dense layers.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are changed, if they are.
        norm_eps: epsilon of every RMSNorm.
        tied_embeddings: whether the head is the transposed embedding.
        max_context: positions the model was made for.
        qk_norm: whether each query and key head is normalised before RoPE (Qwen3).
        attention_bias: whether the four attention projections have biases.
        dtype: of parameters and activations: `float32` or `bfloat16`. Norms, RoPE and accumulation are float32.
        kv_head_copies: how many neighbours of the K kv heads are copies of one, so that each device has its own; K / this
            are the model's.
        num_experts: [E], of every layer that has experts; 0 for a dense model.
        experts_per_token: how many a row goes through.
        expert_size: width of an expert's gated MLP.
        renormalize_experts: whether the weights of a row's experts are scaled to a sum of one.
        dense_layers: numbers of the layers of a model with experts that have an MLP instead.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float
    norm_eps: float
    max_context: int
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    dtype: str = "float32"
    kv_head_copies: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    renormalize_experts: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(f"architecture={self.architecture!r} must be one of {', '.join(_ARCHITECTURES)}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}.")
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
        for name in (*sizes, "max_context", "kv_head_copies"):
            value = getattr(self, name)
            if not _is_whole(value, 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.")
        if self.num_kv_heads % self.kv_head_copies:
            raise ValueError(f"{self.num_kv_heads=} must be a multiple of {self.kv_head_copies=}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs.")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive.")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "factors" and len(scaling.frequency_factors) != self.head_dim // 2:
            raise ValueError(f"{len(scaling.frequency_factors)} rope frequency factors; {self.head_dim=} needs half.")
        self._check_experts()

    def _check_experts(self) -> None:
        names = ("experts_per_token", "expert_size", "renormalize_experts", "dense_layers")
        if not _is_whole(self.num_experts, 0):
            raise ValueError(f"num_experts={self.num_experts!r} must be an integer of at least 0.")
        if not self.num_experts:
            for name in names:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r} needs experts; {self.num_experts=}.")
            return
        for name in names[:2]:
            if not _is_whole(getattr(self, name), 1):
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer of at least 1.")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"{self.experts_per_token=} must be at most {self.num_experts=}.")
        dense = self.dense_layers
        if list(dense) != sorted(set(dense)) or not set(dense) < set(range(self.num_layers)):
            raise ValueError(f"{self.dense_layers=} must be ascending and some of {self.num_layers} layers, not all.")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def linear_cost(self) -> float:
        """The c of the cost formula (paper, section 2.2): a layer's linear parameters over the 2 N H of one attended key.

        23,552 for Qwen3-8B. Norms, embeddings and the head are not counted. Of a layer with experts, the router and the
        experts that a row goes through are: 13,600 for Qwen3-235B-A22B. Dense layers among them count by their share.
        """
        heads = 2 * self.num_heads + 2 * self.num_kv_heads // self.kv_head_copies
        dense = len(self.dense_layers) / self.num_layers if self.num_experts else 1
        experts = 3 * self.experts_per_token * self.expert_size + self.num_experts
        outputs = heads * self.head_dim + dense * 3 * self.mlp_size + (1 - dense) * experts
        return self.hidden_size * outputs / (2 * self.num_heads * self.head_dim)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in `path`.

    Raises:
        ValueError: the file is missing, is not JSON or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{path}: not valid JSON: {error}.") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}.")


def from_hf_config(hf: Mapping[str, Any], where: str) -> ModelConfig:
    """Reads the fields of a Hugging Face `config.json`, in the older and the newer spelling of RoPE and dtype.

    Args:
        hf: the parsed file.
        where: what to name in errors, usually the file's path.

    Raises:
        ValueError: a field is missing or has a bad value, or the model is one this version cannot run.
    """
    model_type: Any = hf.get("model_type")
    _refuse_other_attention(hf, where)
    if model_type not in _ARCHITECTURES:
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(_ARCHITECTURES)}."
        )
    architecture = _ARCHITECTURES[model_type]
    classes = hf.get("architectures") or [architecture.HF_CLASS]
    if architecture.HF_CLASS not in classes:
        raise ValueError(f"{where}: architectures {classes} is not supported; must hold {architecture.HF_CLASS}.")
    _refuse_unsupported_values(hf, where)

    num_heads = _field(hf, "num_attention_heads", where)
    hidden_size = _field(hf, "hidden_size", where)
    head_dim = hf.get("head_dim") or architecture.default_head_dim(hidden_size, num_heads)
    rope = _object(hf, "rope_parameters", where)
    theta_holder = rope if "rope_theta" in rope else hf
    stored = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    try:
        max_context: Any = _field(hf, "max_position_embeddings", where)
        scaling = _rope_scaling(rope or _object(hf, "rope_scaling", where), max_context, where)
        if scaling is not None and scaling.kind == "yarn" and _is_whole(max_context, 1):
            # Files of models stretched by hand keep the old number.
            max_context = max(max_context, int(scaling.factor * scaling.original_max_context))
        return ModelConfig(
            architecture=model_type,
            vocab_size=_field(hf, "vocab_size", where),
            hidden_size=hidden_size,
            num_layers=_field(hf, "num_hidden_layers", where),
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            mlp_size=_field(hf, "intermediate_size", where),
            rope_theta=_number(theta_holder, "rope_theta", where, architecture.DEFAULT_ROPE_THETA),
            rope_scaling=scaling,
            norm_eps=_number(hf, "rms_norm_eps", where, 1e-6),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            max_context=max_context,
            qk_norm=architecture.QK_NORM,
            attention_bias=bool(hf.get("attention_bias", False)),
            dtype="bfloat16" if stored == "bfloat16" else "float32",
            **(_experts(hf, where) if model_type == qwen3_moe.MODEL_TYPE else {}),
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error


def _field(hf: Mapping[str, Any], name: str, where: str) -> Any:
    if hf.get(name) is None:
        raise ValueError(f"{where}: field {name!r} is missing.")
    return hf[name]


def _object(hf: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = hf.get(name) or {}
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{where}: {name}={value!r} must be an object.")


def _number(hf: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = _field(hf, name, where) if default is None or hf.get(name) is not None else default
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{where}: {name}={value!r} must be a number.")


def _refuse_other_attention(hf: Mapping[str, Any], where: str) -> None:
    """Refuses what is not full causal attention over an MLP or known experts, whatever the model is called."""
    other_layers = sorted({kind for kind in hf.get("layer_types") or () if kind != "full_attention"})
    if other_layers:
        raise ValueError(f"{where}: layer_types has {', '.join(other_layers)}: {_FULL_ATTENTION_ONLY}.")
    # Qwen configurations carry a `sliding_window` that `use_sliding_window: false` switches off.
    default_use = hf.get("sliding_window") is not None and hf.get("model_type") not in _ARCHITECTURES
    if hf.get("use_sliding_window", default_use):
        raise ValueError(f"{where}: sliding_window={hf.get('sliding_window')} is in use: {_FULL_ATTENTION_ONLY}.")
    linear = [
        name for name in ("linear_num_key_heads", "linear_conv_kernel_dim", "ssm_cfg", "state_size") if name in hf
    ]
    if linear:
        raise ValueError(f"{where}: linear attention ({', '.join(linear)}): {_FULL_ATTENTION_ONLY}.")
    num_experts = next((hf[name] for name in (*_NUM_EXPERTS, "n_routed_experts") if hf.get(name)), 0)
    if num_experts and hf.get("model_type") != qwen3_moe.MODEL_TYPE:
        raise ValueError(
            f"{where}: mixture of experts ({num_experts} experts) of model_type {hf.get('model_type')!r} is not "
            f"supported; supported: {qwen3_moe.MODEL_TYPE}."
        )


def _refuse_unsupported_values(hf: Mapping[str, Any], where: str) -> None:
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{where}: hidden_act={activation!r} is not supported; must be 'silu'.")
    rotary = _object(hf, "rope_parameters", where).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if rotary != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor={rotary} is not supported; must be 1.")
    for name in ("mlp_bias", "quantization_config"):
        if hf.get(name):
            raise ValueError(f"{where}: {name}={hf[name]!r} is not supported.")


def _experts(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads the fields of `ModelConfig` about experts; none if every layer is dense."""
    counts = {name: hf[name] for name in _NUM_EXPERTS if hf.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{where}: {counts} must be equal.")
    step: Any = hf.get("decoder_sparse_step", 1)
    mlp_only: Any = hf.get("mlp_only_layers") or []
    num_layers: Any = _field(hf, "num_hidden_layers", where)
    if not _is_whole(num_layers, 1):
        return {}  # refused later
    if not isinstance(mlp_only, list) or not all(_is_whole(i, 0) and i < num_layers for i in mlp_only):
        raise ValueError(f"{where}: mlp_only_layers={mlp_only!r} must be a list of layers below {num_layers}.")
    if not _is_whole(step, 1):
        raise ValueError(f"{where}: decoder_sparse_step={step!r} must be an integer of at least 1.")
    dense = qwen3_moe.dense_layers(num_layers, mlp_only, step)
    if len(dense) == num_layers or 0 in counts.values():
        return {}
    return {
        "num_experts": next(iter(counts.values())) if counts else _field(hf, _NUM_EXPERTS[0], where),
        "experts_per_token": _field(hf, "num_experts_per_tok", where),
        "expert_size": _field(hf, "moe_intermediate_size", where),
        "renormalize_experts": bool(hf.get("norm_topk_prob", False)),
        "dense_layers": dense,
    }


def _rope_scaling(rope: Mapping[str, Any], max_context: int, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    place = f"{where}: rope scaling"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(rope, "factor", place))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_number(rope, "factor", place),
            low_freq_factor=_number(rope, "low_freq_factor", place),
            high_freq_factor=_number(rope, "high_freq_factor", place),
            original_max_context=int(_number(rope, "original_max_position_embeddings", place)),
        )
    if kind == "yarn":
        unknown = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        unknown += [] if rope.get("truncate", True) else ["truncate"]
        if unknown:
            raise ValueError(f"{place}: yarn with {unknown[0]}={rope[unknown[0]]!r} is not supported.")
        factor = rope.get("attention_factor")
        return RopeScaling(
            kind="yarn",
            factor=_number(rope, "factor", place),
            original_max_context=int(_number(rope, "original_max_position_embeddings", place, max_context)),
            attention_factor=None if factor is None else _number(rope, "attention_factor", place),
            beta_fast=_number(rope, "beta_fast", place, 32.0),
            beta_slow=_number(rope, "beta_slow", place, 1.0),
        )
    raise ValueError(f"{where}: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn.")
