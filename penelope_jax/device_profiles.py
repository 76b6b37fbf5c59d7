"""Devices as numbers, for the cost model of steps and moves.

Peaks are the public ones of datasheets; the sustained shares of them are assumptions, the same for every device, and
were set before any simulation was compared with anything. Nothing here was measured by this project. Assumed:

- Half of the peak FLOP/s in prefill. FlashAttention-3 reports up to 75 % of an H100's peak for attention alone, and
  large matrix products reach about as much; whole prefill steps, with norms, writes of K/V and gaps between kernels,
  reach less.
- 80 % of the memory bandwidth in decode: published paged attention kernels reach 80 to 90 %.
- 80 % of the host link, for large copies of pinned memory.
- 1 ms a step for launching, sampling and what of the host does not overlap; 10 us a segment; 20 us a move.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """One device and its link to host memory.

    Attributes:
        name: as on the command line.
        source: where the peaks come from.
        peak_flops: dense bfloat16 FLOP/s.
        memory_bandwidth: bytes/s of device memory.
        link_bandwidth: bytes/s between host and device, each way.
        full_duplex: whether both ways run at once at full speed; else they share one queue.
        compute_share, memory_share, link_share: sustained share of each peak.
        step_s: fixed time of a step. segment_s: fixed time of each of its segments.
        move_s: fixed time of a move, in which its link is busy.
    """

    name: str
    source: str
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    full_duplex: bool = True
    compute_share: float = 0.5
    memory_share: float = 0.8
    link_share: float = 0.8
    step_s: float = 1e-3
    segment_s: float = 10e-6
    move_s: float = 20e-6

    def __post_init__(self):
        for name in ("peak_flops", "memory_bandwidth", "link_bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} of device {self.name!r} must be positive and finite.")
        for name in ("compute_share", "memory_share", "link_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} of device {self.name!r} must be in (0, 1].")
        for name in ("step_s", "segment_s", "move_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} of device {self.name!r} must be finite, at least 0.")

    @property
    def flops(self) -> float:
        """Sustained FLOP/s."""
        return self.peak_flops * self.compute_share

    @property
    def memory_bytes_per_s(self) -> float:
        """Sustained bytes/s of device memory."""
        return self.memory_bandwidth * self.memory_share

    @property
    def link_bytes_per_s(self) -> float:
        """Sustained bytes/s of the host link, each way."""
        return self.link_bandwidth * self.link_share


_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9  # x16, each way
_TPU_LINK = "; the host link is not published: PCIe 3 x16 is assumed"

PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="a100",
            source="NVIDIA A100 80GB SXM datasheet; PCIe 4 x16",
            peak_flops=312e12,
            memory_bandwidth=2.039e12,
            link_bandwidth=_PCIE_4,
        ),
        DeviceProfile(
            name="h100",
            source="NVIDIA H100 SXM5 datasheet; PCIe 5 x16",
            peak_flops=989.4e12,
            memory_bandwidth=3.35e12,
            link_bandwidth=_PCIE_5,
        ),
        DeviceProfile(
            name="h200",
            source="NVIDIA H200 SXM datasheet; PCIe 5 x16",
            peak_flops=989.4e12,
            memory_bandwidth=4.8e12,
            link_bandwidth=_PCIE_5,
        ),
        DeviceProfile(
            name="v5e",
            source="Google Cloud TPU v5e documentation" + _TPU_LINK,
            peak_flops=197e12,
            memory_bandwidth=819e9,
            link_bandwidth=_PCIE_3,
        ),
        DeviceProfile(
            name="v5p",
            source="Google Cloud TPU v5p documentation" + _TPU_LINK,
            peak_flops=459e12,
            memory_bandwidth=2.765e12,
            link_bandwidth=_PCIE_3,
        ),
        DeviceProfile(
            name="v6e",
            source="Google Cloud TPU v6e documentation" + _TPU_LINK,
            peak_flops=918e12,
            memory_bandwidth=1.64e12,
            link_bandwidth=_PCIE_3,
        ),
        DeviceProfile(
            name="toy",
            source="round numbers for tests and toy models; no device",
            peak_flops=2e11,
            memory_bandwidth=2e10,
            link_bandwidth=5e9,
        ),
    )
}


def profile_named(name: str) -> DeviceProfile:
    """Returns the profile called `name`.

    Raises:
        ValueError: no such profile; the message lists those that exist.
    """
    if name not in PROFILES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(PROFILES)}.")
    return PROFILES[name]
