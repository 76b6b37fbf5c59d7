"""What writes the KV pool or reads whole pages of it, alone, to see from the compiler that it does so in place."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax.experiments.aot_programs import Program, shard_bytes
from penelope_jax.forward import HEADS_SPEC, POOL_SPEC
from penelope_jax.kernels.kv_write import write_kv
from penelope_jax.kernels.page_copy import PAGE_BUCKETS, gather_pages, page_sharding, scatter_pages

PoolShape = tuple[int, int, int, int, int, int]  # [P, L, 2, K, page_size, H]


def abstract_pool(shape: PoolShape, dtype: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns a pool, its kv heads spread over the mesh."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, POOL_SPEC))


def copy_programs(pool: jax.ShapeDtypeStruct, num_rows: int, num_segments: int) -> list[Program]:
    """Returns the writes of a step inside a scan over the layers, and page copies of the smallest and largest bucket."""
    return [
        write_program(pool, num_rows, num_segments),
        *[
            program(pool, number)
            for program in (gather_program, scatter_program)
            for number in PAGE_BUCKETS[:: len(PAGE_BUCKETS) - 1]
        ],
    ]


def write_program(pool: jax.ShapeDtypeStruct, num_rows: int, num_segments: int) -> Program:
    """Writes K and V of a step to every layer, as `forward_step` does.

    Args:
        pool: [P, L, 2, K, page_size, H].
        num_rows: T.
        num_segments: of the step.
    """
    num_layers, _, num_kv_heads, page_size, head_dim = pool.shape[1:]
    mesh = _mesh(pool)
    num_pages = min(num_rows, num_rows // page_size + num_segments)

    def on_device(kv_pool, keys, values, write_pages, write_source):
        def write_layer(kv_pool, layer):
            return write_kv(kv_pool, layer, keys, values, write_pages, write_source), None

        return jax.lax.scan(write_layer, kv_pool, jnp.arange(num_layers, dtype=jnp.int32))[0]

    everywhere = PartitionSpec()
    write = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(POOL_SPEC, HEADS_SPEC, HEADS_SPEC, everywhere, everywhere),
        out_specs=POOL_SPEC,
        check_vma=False,
    )
    rows = _on_mesh(mesh, (num_rows, num_kv_heads, head_dim), pool.dtype, HEADS_SPEC)
    places = _on_mesh(mesh, (num_pages, page_size), "int32")
    page_bytes = shard_bytes(pool) // (pool.shape[0] * num_layers)  # of one layer
    return Program(
        name=f"write_kv, {num_rows} rows, every layer",
        function=write,
        arguments=(pool, rows, rows, _on_mesh(mesh, (num_pages,), "int32"), places),
        donated=(0,),
        pool=pool,
        writes=True,
        most_temporary_bytes=8 * num_pages * page_bytes + 2**20,  # the rows in a few arrangements
    )


def gather_program(pool: jax.ShapeDtypeStruct, num_pages: int) -> Program:
    """Copies pages out of the pool."""
    return Program(
        name=f"gather_pages, {num_pages}",
        function=functools.partial(gather_pages, sharding=pool.sharding),
        arguments=(pool, _on_mesh(_mesh(pool), (num_pages,), "int32")),
        donated=(),
        pool=pool,
        writes=False,
        most_temporary_bytes=num_pages * _page_bytes(pool),
    )


def scatter_program(pool: jax.ShapeDtypeStruct, num_pages: int) -> Program:
    """Copies pages into the pool."""
    page = jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype, sharding=page_sharding(pool.sharding))
    return Program(
        name=f"scatter_pages, {num_pages}",
        function=functools.partial(scatter_pages, sharding=pool.sharding),
        arguments=(pool, _on_mesh(_mesh(pool), (num_pages,), "int32"), (page,) * num_pages),
        donated=(0,),
        pool=pool,
        writes=True,
        most_temporary_bytes=num_pages * _page_bytes(pool),
    )


def _page_bytes(pool: jax.ShapeDtypeStruct) -> int:
    return shard_bytes(pool) // pool.shape[0]


def _mesh(pool: jax.ShapeDtypeStruct) -> Mesh:
    assert isinstance(pool.sharding, NamedSharding) and isinstance(pool.sharding.mesh, Mesh), "made by abstract_pool"
    return pool.sharding.mesh


def _on_mesh(mesh: Mesh, shape: tuple[int, ...], dtype, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec or PartitionSpec()))
