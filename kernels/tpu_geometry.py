"""What is static of paged attention on TPU: the generations, sizes, and the plan of the vector memory."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

# Keys that the softmax takes in at a time, anchored at position 0: the order of every sum. As compiled for v6e and v5e,
# 256 rows of a head take 612 and 615 instructions for 512 keys, and 1,064 and 1,054 for two times 256.
CHUNK = 512
HEAD_DIM = 128  # the lanes of a register: the head dim that there is, and the width of all that a row has one of

_MAX_ROWS = 512
_SMEM_BYTES = 896 * 1024  # for what is counted below, of the 1 MiB that each generation has


@dataclasses.dataclass(frozen=True)
class Generation:
    """What differs between generations of TPUs.

    Attributes:
        step_bytes: K and V that are loaded at a time, a power of two that takes 1.1 to 1.7 microseconds at the
            bandwidth of a core (0.82, 1.23, 1.64 and 3.7 TB/s in the order below): longer than a copy needs to start,
            so that one step in flight beside the one that is computed keeps the memory busy, and no longer, as the
            first step of all is waited for.
        vmem_bytes: what a kernel may use of a core's vector memory: half of it (128, 64, 128, 64 MiB). The rest is
            left to what XLA keeps there around the kernel.
        cores: of a device. The two cores of a v5p chip are one device and share a grid.
    """

    step_bytes: int
    vmem_bytes: int
    cores: int = 1


_MIB = 1024 * 1024
GENERATIONS = {
    "v5e": Generation(1 * _MIB, 64 * _MIB),
    "v5p": Generation(2 * _MIB, 32 * _MIB, cores=2),
    "v6e": Generation(2 * _MIB, 64 * _MIB),
    "tpu7x": Generation(4 * _MIB, 32 * _MIB),
}
# As jax names devices.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7": "tpu7x",
    "TPU7x": "tpu7x",
}


def generation_of(device_kind: str) -> str | None:
    """Returns the name in `GENERATIONS` of a kind of device, or None for what the kernel is not for."""
    return _KINDS.get(device_kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is static of a call.

    Attributes:
        generation: of the device.
        group: query heads for each kv head.
        num_kv_heads: kv heads.
        page_size: 16, 32, 64 or 128.
        max_pages: of a history.
        dtype: of queries, keys and values; sums are float32.
        packed_rows: rows that a tile packs for each kv head.
        scale: what scores are multiplied by.
    """

    generation: Generation
    group: int
    num_kv_heads: int
    page_size: int
    max_pages: int
    dtype: Any
    packed_rows: int
    scale: float

    @property
    def rows(self) -> int:
        """Packed rows of a block, for each kv head: a tile is cut into equal blocks that fit the vector memory."""
        most = _MAX_ROWS
        while most > 16 and self.vmem_bytes(most) > self.generation.vmem_bytes:
            most //= 2
        return _round_up(-(-self.packed_rows // -(-self.packed_rows // most)), 16)

    @property
    def blocks_per_tile(self) -> int:
        return -(-self.packed_rows // self.rows)

    @property
    def keys_per_step(self) -> int:
        """Keys that are loaded at a time, a multiple of `CHUNK`."""
        bytes_per_key = 2 * self.num_kv_heads * HEAD_DIM * jnp.dtype(self.dtype).itemsize
        most = max(CHUNK, self.generation.step_bytes // bytes_per_key // CHUNK * CHUNK)
        return min(most, _round_up(self.max_pages * self.page_size, CHUNK))

    @property
    def pages_per_step(self) -> int:
        return self.keys_per_step // self.page_size

    @property
    def heads_at_once(self) -> int:
        """Kv heads whose work is one run of instructions, so that products of some overlap the softmax of others."""
        most = min(8, max(1, 512 // self.rows))
        return max(number for number in range(1, most + 1) if self.num_kv_heads % number == 0)

    @property
    def scale_log2(self) -> float:
        """The scale for weights that are powers of two."""
        return self.scale * math.log2(math.e)

    def vmem_bytes(self, rows: int) -> int:
        """Returns about what blocks of so many rows need."""
        itemsize = jnp.dtype(self.dtype).itemsize
        pages = 2 * 2 * self.num_kv_heads * self.keys_per_step * HEAD_DIM * itemsize
        windows = 2 * 2 * self.num_kv_heads * rows * HEAD_DIM * itemsize  # queries and what they become, two of each
        running = 3 * self.num_kv_heads * rows * HEAD_DIM * 4
        scores = 4 * rows * CHUNK * 4
        return pages + windows + running + scores

    @property
    def vmem_limit(self) -> int:
        """What the kernel asks for: the plan is an estimate, so twice that, if there is as much."""
        return min(self.generation.vmem_bytes, 2 * self.vmem_bytes(self.rows))

    def check_memory(self, num_blocks: int) -> None:
        """Raises ValueError where a kernel for so many blocks does not fit a core's memories."""
        needed = self.vmem_bytes(self.rows)
        if needed > self.generation.vmem_bytes:
            raise ValueError(
                f"kv_pool has {self.num_kv_heads} kv heads; blocks of {self.rows} rows of them take {needed} bytes of "
                f"vector memory, the TPU kernel supports {self.generation.vmem_bytes}."
            )
        # Two rows of the page table, each while the next is loaded; four numbers for each block.
        needed = 4 * 4 * _round_up(self.max_pages, HEAD_DIM) + 4 * 4 * num_blocks
        if needed > _SMEM_BYTES:
            raise ValueError(
                f"page_table has max_pages={self.max_pages} and tiles make {num_blocks} blocks; the TPU kernel "
                f"supports tables of {_SMEM_BYTES} bytes in scalar memory, these take {needed}."
            )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
