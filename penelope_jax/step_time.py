"""How long a step takes, from cost units and a device profile: a roofline.

A step computes its rows and reads, once each, the weights and the K/V that its rows attend to. It takes the longer of
the two times, as if the device overlapped them perfectly, and a fixed time for itself and for each segment. So prefill
and phantom rows are bound by computing (units of the paper's formula), and decode rows by reading.

One unit is a query-key pair in every head of a layer: two products of N x H multiply-accumulates, 4 N H FLOPs. The
linear work of a token is c units, so one efficiency holds for both, as in the paper's formula (its figure 1 finds the
formula within 4 % of an H100). The head is counted for reading only: few rows are sampled.

Of a model with experts, a step of T tokens reads those that its tokens choose: with E experts and k a token, chosen
evenly, E (1 - (1 - k/E)^T) of each layer.

With `scale` K a token of the plan stands for K tokens. Rows of prefill cost what their K-fold positions cost. A decode
row stands for K steps of one token each: the first in the company of the step's prefill rows, then K - 1 steps of
decode rows alone, so a prefill beside decodes is told K - 1 decode steps late, and a request that arrives meanwhile
waits for all of them.
"""

import dataclasses
from collections.abc import Sequence

from penelope_jax.cost import units
from penelope_jax.device_profiles import DeviceProfile
from penelope_jax.segments import Segment, SegmentKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """A model as numbers.

    Attributes:
        name: for reports.
        linear_cost: c of the cost formula, in units.
        unit_flops: FLOPs of one unit in all layers: 4 N H L.
        weight_bytes: read by every step: all weights but the embedding table and the experts.
        expert_bytes: all experts of all layers; 0 without.
        num_experts, experts_per_token: of a layer; 0 without.
        kv_bytes_per_token: K and V of one token in all layers.
    """

    name: str
    linear_cost: float
    unit_flops: float
    weight_bytes: float
    kv_bytes_per_token: float
    expert_bytes: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0

    def bytes_read(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step of `num_tokens` tokens reads."""
        if not self.num_experts:
            return self.weight_bytes
        untouched = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.weight_bytes + self.expert_bytes * (1 - untouched)


class StepTimer:
    """Times of steps and moves of one model on one or several devices.

    Args:
        model: the model.
        device: the profile.
        num_devices: devices that share all work, memory and links evenly; what they say to each other is not counted.
        scale: tokens that a token of the plans stands for.
    """

    def __init__(self, model: ModelCosts, device: DeviceProfile, *, num_devices: int = 1, scale: int = 1):
        for name, value in (("num_devices", num_devices), ("scale", scale)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.model = model
        self.device = device
        self.num_devices = num_devices
        self.scale = scale
        self.unit_s = model.unit_flops / (device.flops * num_devices)
        self._byte_s = 1 / (device.memory_bytes_per_s * num_devices)
        self._kv_token_s = model.kv_bytes_per_token * self._byte_s
        self._link_byte_s = 1 / (device.link_bytes_per_s * num_devices)
        self._weights_s: dict[int, float] = {}  # by tokens of a step

    def seconds(self, segments: Sequence[Segment]) -> float:
        """Returns the time of a step with these segments."""
        scale = self.scale
        compute_units, kv_tokens, num_tokens, num_decodes, positions = 0.0, 0, 0, 0, 0
        for segment in segments:
            start = segment.start * scale
            if segment.kind is SegmentKind.DECODE:
                num_decodes += 1
                positions += start
            else:
                stop = segment.stop * scale
                compute_units += units(start, stop, self.model.linear_cost)
                kv_tokens += stop
                num_tokens += stop - start
        first = self._roofline(compute_units, kv_tokens, num_tokens, num_decodes, positions, len(segments))
        return first + self._later_decodes(num_decodes, positions) if scale > 1 and num_decodes else first

    def decode_seconds(self, num_decodes: int, positions: int) -> float:
        """Returns the time of a step that only decodes; the same as `seconds` of its segments.

        Args:
            num_decodes: its rows.
            positions: the sum of their positions, each times `scale`.
        """
        first = self._roofline(0.0, 0, 0, num_decodes, positions, num_decodes)
        return first + self._later_decodes(num_decodes, positions) if self.scale > 1 else first

    def _later_decodes(self, num_decodes: int, positions: int) -> float:
        steps = range(1, self.scale)
        return sum(self._roofline(0.0, 0, 0, num_decodes, positions + j * num_decodes, num_decodes) for j in steps)

    def _roofline(
        self,
        compute_units: float,
        kv_tokens: int,
        num_tokens: int,
        num_decodes: int,
        positions: int,
        num_segments: int,
    ) -> float:
        compute_units += num_decodes * self.model.linear_cost + positions
        kv_tokens += positions + num_decodes
        num_tokens += num_decodes
        weights_s = self._weights_s.get(num_tokens)
        if weights_s is None:
            weights_s = self._weights_s[num_tokens] = self.model.bytes_read(num_tokens) * self._byte_s
        memory_s = weights_s + kv_tokens * self._kv_token_s
        device = self.device
        return max(compute_units * self.unit_s, memory_s) + device.step_s + num_segments * device.segment_s

    def move_seconds(self, num_pages: int, page_size: int) -> float:
        """Returns how long the link is busy with a move of `num_pages` pages of `page_size` tokens."""
        num_bytes = num_pages * page_size * self.scale * self.model.kv_bytes_per_token
        return num_bytes * self._link_byte_s + self.device.move_s

    def load_units(self, page_size: int) -> float:
        """Returns what loading a page of `page_size` tokens costs, in units of the plans (`EngineConfig.load_units`).

        A page in a long move: the fixed time of a move is left out. With `scale` K a unit of the plans stands for K^2.
        """
        num_bytes = page_size * self.scale * self.model.kv_bytes_per_token
        return num_bytes * self._link_byte_s / self.unit_s / self.scale**2


def scaled_linear_cost(linear_cost: float, scale: int) -> float:
    """Returns c for tokens that stand for `scale` tokens each.

    With it, units of scaled positions times `scale` squared are exactly the units of the positions they stand for.
    """
    return (linear_cost + (scale - 1) / 2) / scale
