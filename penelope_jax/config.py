"""Configuration values of the cache and the engine.

Every config is frozen, keyword-only and checked at birth. Policies are data (design rule 7): where in a history
eviction starts, how much it frees at once, and what the surrounding system does that decides how much that hurts.
"""

import dataclasses
import enum

from penelope_jax.value_bytes import ADDED


class Start(enum.Enum):
    """Where in the chosen history eviction starts (paper, part one)."""

    LEAF_TAIL = "leaf-tail"
    LEAF_HEAD = "leaf-head"
    PRIVATE_FRONT = "private-front"


class Unit(enum.Enum):
    """What eviction frees at once: a whole tree node, or single pages."""

    NODE = "node"
    PAGE = "page"


class History(enum.Enum):
    """The order in which histories are chosen."""

    LRU = "lru"


class InsertUnit(enum.Enum):
    """What one insert is; it sets the size of a tree node and so how much whole-node eviction frees."""

    CHUNK = "chunk"
    PROMPT = "prompt"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """An eviction policy, as data.

    Attributes:
        name: the name on the command line.
        start: where in a history eviction starts.
        unit: what is freed at once.
        history: the order of histories.
        stamp_waiting: whether the histories of waiting requests are stamped at each scheduling round, as SGLang does
            under LPM.
        insert_unit: whether a tree node is one prefill chunk or one whole prompt.
        inclusive: with a host tier, whether the tiers are two caches as in SGLang: a page that leaves the device is
            written back to the host and keeps its place there when it returns, and each tier evicts by its own order.
            Else a page is in one tier, and one order over both says what is evicted.
        reclaim_copies: of two caches, whether the host first gives up copies of what is on the device, as SGLang 0.5.23
            does. In 0.5.10, which is what the paper very likely compared with, copies stay and the host holds less.
        count_host_hits: whether the order of the queue counts what is on the host.
    """

    name: str
    start: Start
    unit: Unit
    history: History = History.LRU
    stamp_waiting: bool = True
    insert_unit: InsertUnit = InsertUnit.CHUNK
    inclusive: bool = dataclasses.field(default=False, metadata=ADDED)
    reclaim_copies: bool = dataclasses.field(default=False, metadata=ADDED)
    count_host_hits: bool = dataclasses.field(default=True, metadata=ADDED)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="sglang", start=Start.LEAF_TAIL, unit=Unit.NODE, inclusive=True),
        Policy(name="sglang-reclaim", start=Start.LEAF_TAIL, unit=Unit.NODE, inclusive=True, reclaim_copies=True),
        Policy(name="sglang-device-lpm", start=Start.LEAF_TAIL, unit=Unit.NODE, inclusive=True, count_host_hits=False),
        Policy(name="vllm", start=Start.LEAF_TAIL, unit=Unit.PAGE, stamp_waiting=False),
        Policy(name="leaf-head", start=Start.LEAF_HEAD, unit=Unit.PAGE),
        Policy(name="leaf-head-node", start=Start.LEAF_HEAD, unit=Unit.NODE),
        Policy(name="front-node", start=Start.PRIVATE_FRONT, unit=Unit.NODE),
        Policy(name="penelope", start=Start.PRIVATE_FRONT, unit=Unit.PAGE),
    )
}

MAX_TIER_PAGES = 2**24
"""Most pages of a tier: the cache lists them all."""

SCHEDULERS: tuple[str, ...] = ("lpm", "lpm-cost", "fcfs")


def policy_named(name: str) -> Policy:
    """Returns the policy called `name`.

    Raises:
        ValueError: no such policy; the message lists those that exist.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}.")
    return POLICIES[name]


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless `page_size` is a power of two from 1 to 1,024."""
    if page_size < 1 or page_size > 1024 or page_size & (page_size - 1):
        raise ValueError(f"{page_size=} must be a power of two from 1 to 1024.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits and choices of the pure engine. Token counts are rounded to whole pages by the caller.

    Attributes:
        device_tokens: capacity of the device pool, in tokens; a multiple of `page_size`.
        host_tokens: capacity of the host pool, in tokens (0: no host tier).
        swap_tokens: host memory beyond `host_tokens` through which pages change places when both tiers are full
            (paper, part three); without a host tier it does not exist.
        max_moving_tokens: most tokens whose pages are moving at once, both ways together; 0: `max_step_tokens` +
            `swap_tokens`. Bounds the memory that copies hold.
        prefetch_tokens: most tokens loaded ahead for waiting requests at once; 0: none.
        load_units: what loading a page costs, in units: its bytes by the link's bandwidth and the time of a unit. A
            host page that is cheaper to compute is computed; 0: every host page is loaded.
        page_size: tokens a page.
        policy: the eviction policy.
        scheduler: `lpm`, `lpm-cost` or `fcfs`.
        max_context: most tokens (prompt + output) of one request.
        max_running: most requests admitted at once.
        max_step_tokens: token budget of one step (the prefill chunk).
        max_step_segments: most segments (rows of the page table) in one step.
        output_reserve: output tokens for which admission reserves room; the rest may end in retraction.
        max_wait_s: with `lpm-cost`, a request that waited longer goes first.
        linear_cost: c of the cost formula, in units (paper, section 2.2).
        vocab_size: token ids must be below it.
        weights_fingerprint: hash of the weights, part of every key of the cache (rule 12); "" when it is never saved.
    """

    device_tokens: int
    host_tokens: int = 0
    page_size: int = 64
    policy: Policy = POLICIES["penelope"]
    scheduler: str = "lpm"
    max_context: int = 32768
    max_running: int = 16
    max_step_tokens: int = 8192
    max_step_segments: int = 32
    output_reserve: int = 512
    max_wait_s: float = 60.0
    linear_cost: float = 0.0
    vocab_size: int = 2**31 - 1
    weights_fingerprint: str = ""
    swap_tokens: int = dataclasses.field(default=1024, metadata=ADDED)
    max_moving_tokens: int = dataclasses.field(default=0, metadata=ADDED)
    prefetch_tokens: int = dataclasses.field(default=1024, metadata=ADDED)
    load_units: float = dataclasses.field(default=0.0, metadata=ADDED)

    def __post_init__(self):
        check_page_size(self.page_size)
        for name in (
            "device_tokens",
            "max_context",
            "max_running",
            "max_step_tokens",
            "max_step_segments",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in (
            "host_tokens",
            "output_reserve",
            "max_wait_s",
            "linear_cost",
            "swap_tokens",
            "max_moving_tokens",
            "prefetch_tokens",
            "load_units",
        ):
            if not getattr(self, name) >= 0:  # not a number either
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        for name in ("device_tokens", "host_tokens", "max_step_tokens"):
            if getattr(self, name) % self.page_size:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of page_size={self.page_size}.")
        if self.host_tokens:
            for name, least in (("swap_tokens", 1), ("max_moving_tokens", 0), ("prefetch_tokens", 0)):
                value = getattr(self, name)
                if value % self.page_size or value < least:
                    raise ValueError(
                        f"{name}={value} must be a multiple of page_size={self.page_size}, and at least {least}, "
                        "with a host tier."
                    )
            if 0 < self.max_moving_tokens < 2 * self.page_size:
                raise ValueError(
                    f"max_moving_tokens={self.max_moving_tokens} must be 0 or at least 2 pages of {self.page_size} tokens: "
                    "with both tiers full a page is loaded while another one leaves."
                )
        for name, number in (
            ("device_tokens", self.num_device_pages),
            ("host_tokens", self.num_host_pages),
            ("swap_tokens", self.num_swap_pages),
        ):
            if number > MAX_TIER_PAGES:
                raise ValueError(
                    f"{name}={getattr(self, name)} are {number} pages of {self.page_size} tokens; at most "
                    f"{MAX_TIER_PAGES} can be."
                )
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"unknown scheduler {self.scheduler!r}; known: {', '.join(SCHEDULERS)}.")

    def namespace(self, cache_salt: str) -> str:
        """Returns the part of the cache that requests with this salt share."""
        return f"{self.weights_fingerprint}:{cache_salt}" if self.weights_fingerprint else cache_salt

    @property
    def num_device_pages(self) -> int:
        return self.device_tokens // self.page_size

    @property
    def num_host_pages(self) -> int:
        return self.host_tokens // self.page_size

    @property
    def num_swap_pages(self) -> int:
        """Host pages beyond `num_host_pages`; host page ids are below the sum of both."""
        return self.swap_tokens // self.page_size if self.host_tokens else 0

    @property
    def max_moving_pages(self) -> int:
        return (self.max_moving_tokens or self.max_step_tokens + self.swap_tokens) // self.page_size

    @property
    def max_prefetch_pages(self) -> int:
        return self.prefetch_tokens // self.page_size
