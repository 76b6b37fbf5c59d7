"""The programs of `aot_check` that change or read the pool, compiled for this machine: in place, and controls that are not."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from penelope_jax.experiments import aot_copies, aot_cuda
from penelope_jax.experiments.aot_models import Deployment, step_program
from penelope_jax.experiments.aot_programs import Program, large_copies, memory_missed, shard_bytes, total_bytes
from penelope_jax.models.layers import device_mesh

POOL_SHAPE = (256, 4, 2, 4, 8, 16)
LAYER_BYTES = 2 * 256 * 2 * 4 * 8 * 16  # of bfloat16


def compiled(program: Program) -> types.SimpleNamespace:
    executable = jax.jit(program.function, donate_argnums=program.donated).lower(*program.arguments).compile()
    memory = executable.memory_analysis()
    return types.SimpleNamespace(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        large_copies=large_copies(executable.as_text()),
    )


def pool_on(tensor: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return aot_copies.abstract_pool(POOL_SHAPE, dtype, device_mesh(1, tensor))


@pytest.mark.parametrize("tensor", [1, 4])
def test_writes_and_page_copies_are_in_place(tensor):
    pool = pool_on(tensor)
    assert shard_bytes(pool) == 4 * LAYER_BYTES // tensor
    for program in aot_copies.copy_programs(pool, num_rows=64, num_segments=4):
        # The bar of an accelerator, and that not even a layer is copied.
        program = dataclasses.replace(program, most_temporary_bytes=LAYER_BYTES // tensor // 2)
        report = compiled(program)
        assert memory_missed(program, report) == [], program.name
        pages = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(program.arguments))
        assert total_bytes(report) < pages + LAYER_BYTES, program.name


def test_the_whole_step_is_in_place_on_a_mesh():
    program = step_program(Deployment("tiny-moe", "h100", 2, 2, pool_tokens=2**18), 128, device_mesh(2, 2))
    report = compiled(program)
    assert memory_missed(program, report) == []
    assert report.argument_bytes > shard_bytes(program.pool)


def test_control_without_donation():
    program = dataclasses.replace(aot_copies.scatter_program(pool_on(1), 1), donated=())
    assert f"aliases 0 bytes; the pool has {4 * LAYER_BYTES}" in memory_missed(program, compiled(program))


def test_control_a_gather_that_consumes_the_pool():
    program = aot_copies.gather_program(pool_on(1), 1)
    report = types.SimpleNamespace(**vars(compiled(program)) | {"aliased_bytes": 64})
    assert memory_missed(program, report) == ["aliases 64 bytes of a pool that must stay valid"]


def test_control_a_scan_that_hands_out_layers_copies_them():
    program = aot_copies.write_program(pool_on(1, "float32"), 64, 4)

    def by_layers(kv_pool, keys, values, write_pages, write_source):
        def write_layer(carry, layer):
            return carry, layer.at[write_pages].add(1, mode="drop")

        return jax.lax.scan(write_layer, 0, kv_pool.swapaxes(0, 1))[1].swapaxes(0, 1)

    program = dataclasses.replace(program, function=by_layers, most_temporary_bytes=LAYER_BYTES)
    assert memory_missed(program, compiled(program))


def test_large_copies_are_found_in_a_program():
    hlo = """
      %copy.1 = bf16[1024,2,128]{2,1,0:T(2,128)(2,1)S(1)} copy(%bitcast.50), metadata={op_name="a"}
      %copy-start.7 = (f32[512,1024]{1,0:T(8,128)S(1)}, f32[512,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.4)
      %copy.2 = s32[]{:T(128)} copy(%constant.7)
      %copy-done.7 = f32[512,1024]{1,0} copy-done(%copy-start.7)
      ROOT %fusion.3 = f32[1024,1024]{1,0} fusion(%copy.1), kind=kLoop
    """
    assert large_copies(hlo) == ("f32[512,1024]",)
    assert large_copies(hlo.replace("1024,2,", "8192,2,")) == ("bf16[8192,2,128]", "f32[512,1024]")


def test_copies_of_the_pool_or_of_a_layer_are_refused():
    program = aot_copies.write_program(pool_on(1), 64, 4)
    report = compiled(program)
    for copied, wrong in (
        ("bf16[256,4,2,4,8,16]", True),
        ("bf16[256,2,4,8,16]", True),  # a layer
        ("bf16[32,2,4,8,16]", False),  # the pages that are written
        ("f32[4096,4096]", False),
    ):
        report.large_copies = (copied,)
        assert bool(memory_missed(program, report)) == wrong, copied


def test_bytes_of_a_device():
    array = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert shard_bytes(array) == 128
    report = types.SimpleNamespace(argument_bytes=100, output_bytes=50, aliased_bytes=40, temporary_bytes=7)
    assert total_bytes(report) == 117


def test_kernels_are_told_apart_by_their_threads(tmp_path, monkeypatch):
    """The two texts of a kernel are numbered in different orders where kernels have one name."""
    for stem, threads in (("attend_0", 384), ("attend_1", 256), ("combine_2", 128)):
        launch = f"gpu.launch async [%3] blocks(%a) in (%b = %c9) threads(%c, %d) in (%e = %c{threads}, %f = %c1)"
        (tmp_path / f"{stem}.before_layout_inference.txt").write_text(f"{stem} {launch}\n")
    for stem, threads in (("attend_0", 256), ("attend_2", 384), ("combine_1", 128)):
        (tmp_path / f"{stem}.ptx").write_text(f".entry k(\n)\n.maxntid {threads}, 1, 1\n")
    monkeypatch.setattr(aot_cuda, "_known_kernels", {})
    monkeypatch.setattr(aot_cuda, "_read_kernel", lambda name, path, launch: (name, path.name))
    read = aot_cuda._read_kernels(tmp_path)
    assert read == (("attend", "attend_2.ptx"), ("attend", "attend_0.ptx"), ("combine", "combine_1.ptx"))
    for path in tmp_path.glob("*.ptx"):
        path.unlink()
    assert aot_cuda._read_kernels(tmp_path) == read  # known, so not compiled again

    (tmp_path / "attend_7.ptx").write_text(".maxntid 384, 1, 1")
    with pytest.raises(RuntimeError, match="attend_7 belongs to no kernel"):
        aot_cuda._read_kernels(tmp_path)
    monkeypatch.setattr(aot_cuda, "_known_kernels", {})
    with pytest.raises(RuntimeError, match="0 kernels of 256 threads are called attend; expected 1"):
        aot_cuda._read_kernels(tmp_path)
