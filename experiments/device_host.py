"""What the parts of `device_check.py` run on: one device, that is there, or a CPU in its place, or absent."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax.experiments.device_timing import Timing, time_calls
from penelope_jax.models.layers import single_device_mesh

_ABSENT_MEMORY = 72 * 10**9  # bytes of an H100 that arrays can take: programs are compiled in sizes that fit it
_DRAWN_VALUES = 1 << 26  # at once, in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to compile, with its abstract arguments.

    Attributes:
        name: unique; programs of one name are compiled once.
        function: takes what `arguments` describes.
        arguments: pytrees of `jax.ShapeDtypeStruct`s with shardings.
        donate: numbers of the arguments that are consumed.
        needs_cudnn: cannot be compiled where cuDNN is not installed.
    """

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: tuple[int, ...] = ()
    needs_cudnn: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """Where parts run.

    Attributes:
        mesh: one device, with axes `data` and `tensor`.
        dry: tiny sizes on a CPU; no figure means anything.
        deadline_s: on `time.monotonic`, when nothing more is started.
        cases: when not empty, only cases whose names contain one of these run.
        ceilings: what the part `ceilings` measured, by name: `matmul` FLOP/s, `copy` bytes/s.
    """

    mesh: Mesh
    dry: bool = False
    deadline_s: float = float("inf")
    cases: tuple[str, ...] = ()
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    _compiled: dict[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def here(**fields: Any) -> "Host":
        """Returns the host whose first device jax sees."""
        return Host(mesh=single_device_mesh(), **fields)

    @property
    def implementation(self) -> str:
        """What attends in the steps of a model."""
        return "cpu" if self.dry else "gpu"

    @property
    def usable_bytes(self) -> int:
        """Device memory that arrays can take."""
        try:
            stats = self.mesh.devices.flat[0].memory_stats() or {}
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError):  # of a device that is not there
            stats = {}
        return stats.get("bytes_limit", _ABSENT_MEMORY)

    def ceiling(self, name: str) -> float:
        """Returns what `ceilings` measured, or NaN."""
        return self.ceilings.get(name, math.nan)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline_s

    def answers(self) -> bool:
        """Tells whether the device still computes."""
        try:
            return int(jax.block_until_ready(self.put(jnp.arange(4))).sum()) == 6
        except RuntimeError:
            return False

    def wants(self, case: str) -> bool:
        return not self.cases or any(text in case for text in self.cases)

    def sharding(self, spec: PartitionSpec | None = None, memory_kind: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, spec or PartitionSpec(), memory_kind=memory_kind)

    def like(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        """Returns an abstract argument of a program."""
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=self.sharding(spec))

    def compile(self, program: Program) -> Callable[..., Any]:
        """Returns the compiled program; it takes what its `arguments` describe."""
        if program.name not in self._compiled:
            jitted = jax.jit(program.function, donate_argnums=program.donate)
            self._compiled[program.name] = jitted.lower(*program.arguments).compile()
        return self._compiled[program.name]

    def time(
        self, calls: Mapping[str, Callable[[], Any]], *, num_runs: int = 5, least_s: float = 0.06
    ) -> dict[str, Timing]:
        """Times calls as `time_calls` does; in a dry run, once."""
        return (
            time_calls(calls, num_runs=1, least_s=0)
            if self.dry
            else time_calls(calls, num_runs=num_runs, least_s=least_s)
        )

    def put(self, tree: Any) -> Any:
        """Returns arrays of the device."""
        return jax.device_put(tree, self.sharding())

    def normal(self, shape: Sequence[int], dtype: Any, seed: int) -> jax.Array:
        """Returns normally distributed values, drawn on the device in parts, without much more memory."""
        chunk = max(1, min(shape[0], _DRAWN_VALUES // math.prod(shape[1:])))
        return _normal(tuple(shape), jnp.dtype(dtype).name, chunk, seed, self.sharding())


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def _normal(shape: tuple[int, ...], dtype: str, chunk: int, seed: int, sharding: NamedSharding) -> jax.Array:
    key = jax.random.key(seed, impl="unsafe_rbg")  # quick to compile and to run

    def draw(index, out):
        # The last chunk overlaps the one before: starts are clipped.
        rows = jax.random.normal(jax.random.fold_in(key, index), (chunk, *shape[1:]), jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, rows.astype(dtype), index * chunk, axis=0)

    out = jax.lax.fori_loop(0, -(-shape[0] // chunk), draw, jnp.zeros(shape, dtype))
    return jax.lax.with_sharding_constraint(out, sharding)
