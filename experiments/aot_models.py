"""The whole step of models of real sizes, to compile for accelerators that are not there.

Arguments are abstract: no weight exists. Pools are sized to a number of tokens that a deployment would have.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax.batch import Buckets, padding_batch
from penelope_jax.executor import q_tiles
from penelope_jax.experiments.aot_programs import Program, shard_bytes
from penelope_jax.forward import POOL_SPEC, StepSettings, forward_step
from penelope_jax.kernels.paged_attention import resolve_implementation
from penelope_jax.models.layers import config_on_mesh, parameter_shapes, parameter_shardings
from penelope_jax.models.random_weights import PRESETS
from penelope_jax.sampling_slots import slots_like

PAGE_SIZE = 64
MAX_CONTEXT = 131_072  # tokens of the page table's width
MAX_SEGMENTS = 64
DECODE_ROWS, PREFILL_ROWS = 64, 8192


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on a slice.

    Attributes:
        model: name of a preset.
        device: generation of the chips, as in `MEMORY`.
        data: devices along that axis of the mesh, over which only experts lie.
        tensor: devices along that axis, over which heads and all matrices lie.
        pool_tokens: of the KV pool.
    """

    model: str
    device: str
    data: int
    tensor: int
    pool_tokens: int


# Bytes of a device's memory that a program can use. Of TPUs it is what the compiler of libtpu 0.0.50 states when a program
# does not fit (of 16, 95, 32 and, for each of the two devices of a tpu7x, 96 GB). Of GPUs it is what XLA's descriptions of
# the cards state as device memory, less 5 % for the driver, NCCL and XLA itself.
MEMORY = {
    "h100": int(0.95 * 84_942_979_072),
    "h200": int(0.95 * 151_397_597_184),
    "v5e": int(15.75 * 2**30),
    "v5p": int(95.73 * 2**30),
    "v6e": int(31.24 * 2**30),
    "tpu7x": int(94.74 * 2**30),
}

GPU_DEPLOYMENTS = (
    Deployment("qwen3-8b", "h100", 1, 1, 262_144),
    Deployment("qwen3-32b", "h100", 1, 2, 262_144),
    Deployment("qwen3-235b-a22b", "h100", 1, 8, 262_144),
    Deployment("qwen3-8b", "h200", 1, 1, 524_288),
    Deployment("qwen3-32b", "h200", 1, 1, 262_144),
    Deployment("qwen3-235b-a22b", "h200", 1, 8, 1_048_576),
    Deployment("qwen3-235b-a22b", "h200", 2, 4, 524_288),
)
TPU_DEPLOYMENTS = (
    Deployment("qwen3-235b-a22b", "v5p", 16, 4, 1_048_576),
    Deployment("qwen3-235b-a22b", "v6e", 16, 4, 262_144),
    Deployment("qwen3-8b", "v5e", 1, 8, 524_288),
    Deployment("qwen3-8b", "v5p", 1, 4, 1_048_576),
    Deployment("qwen3-8b", "v6e", 1, 8, 1_048_576),
    Deployment("qwen3-32b", "v5e", 2, 8, 196_608),
    Deployment("qwen3-32b", "v5p", 1, 4, 524_288),
    Deployment("qwen3-32b", "v6e", 1, 8, 524_288),
)


def step_program(deployment: Deployment, num_rows: int, mesh: Mesh) -> Program:
    """Returns the step of a deployment.

    Args:
        deployment: the model, its mesh and its pool.
        num_rows: of the batch.
        mesh: of absent devices; their own kernel computes attention.
    """
    config = config_on_mesh(PRESETS[deployment.model], mesh)
    replicated = NamedSharding(mesh, PartitionSpec())

    def on_mesh(leaf, sharding=replicated) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        implementation = resolve_implementation(None)
    buckets = Buckets(
        page_size=PAGE_SIZE,
        max_pages=MAX_CONTEXT // PAGE_SIZE,
        max_segments=MAX_SEGMENTS,
        token_buckets=(num_rows,),
        **q_tiles(config, PAGE_SIZE, implementation, deterministic=False),
    )
    num_pages = deployment.pool_tokens // PAGE_SIZE
    pool_shape = (num_pages, config.num_layers, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    pool = jax.ShapeDtypeStruct(pool_shape, jnp.dtype(config.dtype), sharding=NamedSharding(mesh, POOL_SPEC))
    settings = StepSettings(mesh=mesh, implementation=implementation, deterministic=False)
    return Program(
        name=f"{deployment.model}, {num_rows} rows",
        function=functools.partial(forward_step, config, settings),
        arguments=(
            jax.tree.map(on_mesh, parameter_shapes(config), parameter_shardings(config, mesh)),
            pool,
            jax.tree.map(on_mesh, padding_batch(buckets, num_rows, scoring=False)),
            jax.ShapeDtypeStruct((MAX_SEGMENTS,), jnp.int32, sharding=replicated),
            jax.tree.map(on_mesh, slots_like(MAX_SEGMENTS, config.vocab_size)),
        ),
        donated=(1, 4),
        pool=pool,
        writes=True,
        most_temporary_bytes=shard_bytes(pool) // 2,
    )
