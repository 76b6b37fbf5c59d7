"""Model directories with Orbax parameters: over meshes, through `penelope convert`, and broken."""

import dataclasses
import json
import pathlib
import shutil
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from model_oracle import cpu_mesh, params_of
from test_checkpoint import assert_same, hf_tensors, numpy_params, with_copied_heads, write_hf

from penelope_jax import cli
from penelope_jax.errors import InputError
from penelope_jax.models import layers, orbax_store, random_weights, registry
from penelope_jax.models.config import ModelConfig, RopeScaling
from penelope_jax.models.fingerprint import fingerprint

MOE = dataclasses.replace(
    random_weights.PRESETS["tiny-moe"], num_layers=3, dense_layers=(1,), attention_bias=True, vocab_size=300
)


def on_mesh(config: ModelConfig, data: int, tensor: int) -> tuple[ModelConfig, layers.Params]:
    mesh = cpu_mesh(data, tensor)
    config = layers.config_on_mesh(config, mesh)
    return config, params_of(config, mesh)


def values(params: layers.Params) -> layers.Params:
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("saved_on", [(2, 2), (1, 4)])
def test_saved_on_one_mesh_and_restored_on_others(tmp_path, saved_on):
    """Where `tensor` is 4 there are two copies of each kv head, which are not stored."""
    orbax_store.save_params(tmp_path / "params", *on_mesh(MOE, *saved_on))
    for data, tensor in ((1, 1), (1, 4), (4, 1), (1, 2)):
        config, expected = on_mesh(MOE, data, tensor)
        mesh = cpu_mesh(data, tensor)
        restored = orbax_store.restore_params(tmp_path / "params", config, mesh)
        assert_same(restored, values(expected))
        for leaf, sharding in zip(
            jax.tree.leaves(restored), jax.tree.leaves(layers.parameter_shardings(config, mesh)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_fingerprint_is_of_values_not_of_places():
    names = {fingerprint(*on_mesh(MOE, *shape)) for shape in ((1, 1), (2, 2), (1, 4))}
    assert len(names) == 1
    config, params = on_mesh(MOE, 1, 1)
    assert len(name := names.pop()) == 32

    def changed(leaf):
        flat = np.array(leaf)
        flat.view(np.uint8).reshape(-1)[-1] ^= 1
        return flat

    leaves, tree = jax.tree.flatten(params)
    others = {
        fingerprint(config, jax.tree.unflatten(tree, [*leaves[:i], changed(leaves[i]), *leaves[i + 1 :]]))
        for i in range(len(leaves))
    }
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_context=1024))
    others |= {fingerprint(scaled, params), fingerprint(dataclasses.replace(config, rope_theta=2e6), params)}
    assert len(others - {name}) == len(leaves) + 2


def tokenizer_files(directory: pathlib.Path) -> None:
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns a Hugging Face directory and what `penelope convert` made of it."""
    source, out = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("out") / "model"
    write_hf(source, MOE, hf_tensors(MOE, numpy_params(MOE)), num_shards=2)
    tokenizer_files(source)
    (source / "notes.bin").write_bytes(b"not copied")
    args = cli.parse(["penelope", "convert", str(source), str(out)])
    assert args.run(args) == 0
    return source, out


def test_a_converted_directory_is_the_same_model(folders):
    source, out = folders
    expected, found = registry.load_model(str(source)), registry.load_model(str(out))
    assert_same(found.params, values(expected.params))
    assert found.config == expected.config
    assert found.eos_token_ids == (2, 1)
    assert found.tokenizer is not None and expected.tokenizer is not None
    assert found.tokenizer.encode("b").tolist() == expected.tokenizer.encode("b").tolist()
    assert found.tokenizer.chat_template.render([{"role": "user", "content": "b"}]) == "b"
    assert found.fingerprint == fingerprint(expected.config, expected.params)
    assert expected.fingerprint is None
    assert {path.name for path in out.iterdir()} == {
        *("additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json", "params"),
        *("penelope.json", "tokenizer.json", "tokenizer_config.json"),
    }


def test_a_converted_directory_on_meshes_and_in_another_dtype(folders):
    _, out = folders
    params = numpy_params(MOE)
    four = registry.load_model(str(out), mesh=cpu_mesh(1, 4))
    assert four.config.kv_head_copies == 2
    assert_same(four.params, with_copied_heads(MOE, params, 2))
    assert four.fingerprint == fingerprint(four.config, four.params)
    low = registry.load_model(str(out), dtype="bfloat16")
    assert low.config.dtype == "bfloat16"
    assert low.fingerprint is None
    assert_same(low.params, jax.tree.map(lambda x: x if x.dtype == bool else x.astype(ml_dtypes.bfloat16), params))


def test_convert_to_another_dtype(folders, tmp_path, capsys):
    source, _ = folders
    args = cli.parse(["penelope", "convert", str(source), str(tmp_path / "low"), "--dtype", "bfloat16"])
    assert args.run(args) == 0
    low = registry.load_model(str(tmp_path / "low"))
    assert low.config.dtype == "bfloat16"
    assert low.fingerprint == fingerprint(low.config, low.params)
    line = capsys.readouterr().out
    assert f"in bfloat16, cut for 2 devices, fingerprint {low.fingerprint}, read back equal." in line


def test_convert_refusals(folders, tmp_path):
    source, out = folders
    (tmp_path / "file").write_text("")
    for argv, message in (
        ((out, tmp_path / "new"), f"{out}: is converted already (penelope.json is there)"),
        ((source, out), f"{out}: is not empty; must be a new directory"),
        ((source, tmp_path / "file"), "file: is a file; must be a new directory"),
        ((tmp_path / "none", tmp_path / "new"), "none: no such directory"),
        ((source, tmp_path / "no" / "new"), f"no/new: there is no folder {tmp_path / 'no'}."),
    ):
        args = cli.parse(["penelope", "convert", *map(str, argv)])
        with pytest.raises(ValueError) as raised:
            args.run(args)
        assert message in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("empty", [False, True])
def test_a_conversion_that_was_ended_leaves_nothing(folders, tmp_path, monkeypatch, error, empty):
    source, out = folders[0], tmp_path / "model"
    if empty:
        out.mkdir()
    args = cli.parse(["penelope", "convert", str(source), str(out)])

    def copyfile(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(orbax_store.shutil, "copyfile", copyfile)  # the parameters are written by then
        with pytest.raises((KeyboardInterrupt, InputError)):
            args.run(args)
    assert [path.name for path in tmp_path.rglob("*")] == (["model"] if empty else [])
    assert args.run(args) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and orbax_store.is_model(out)
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def test_convert_into_a_link_to_an_empty_directory(folders, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    args = cli.parse(["penelope", "convert", str(folders[0]), str(tmp_path / "model")])
    assert args.run(args) == 0 and orbax_store.is_model(tmp_path / "disk")


def largest_file(directory: pathlib.Path) -> pathlib.Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def rewrite(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda out: rewrite(out / "penelope.json", format=2),
            "penelope.json: format 2 is not supported; supported: 1",
        ),
        (lambda out: rewrite(out / "penelope.json", dtype="int8"), "penelope.json: dtype must be one of float32"),
        (lambda out: (out / "penelope.json").write_text("{"), "penelope.json: not valid JSON"),
        (lambda out: shutil.rmtree(out / "params"), "params: no Orbax checkpoint, or a broken one"),
        (lambda out: (out / "params" / "_METADATA").unlink(), "params: no Orbax checkpoint, or a broken one"),
        (lambda out: (out / "params" / "manifest.ocdbt").unlink(), "params: no Orbax checkpoint, or a broken one"),
        (lambda out: largest_file(out / "params").write_bytes(b"short"), "params: broken Orbax checkpoint"),
        (
            lambda out: rewrite(out / "config.json", num_experts=16),
            "params: parameter router has shape [3, 64, 8]; the model needs [3, 64, 16]",
        ),
        (
            lambda out: rewrite(out / "config.json", num_hidden_layers=4),
            "params: parameter attention_norm has shape [3, 64]; the model needs [4, 64]",
        ),
        (
            lambda out: rewrite(out / "config.json", attention_bias=False, tie_word_embeddings=True),
            "params: parameters of another model: missing (0): none; not part of this model (5): k_bias, lm_head, o_b",
        ),
        (
            lambda out: rewrite(out / "config.json", mlp_only_layers=[]),
            "not part of this model (4): down_proj, gate_proj, has_experts, up_proj",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads that Orbax leaves behind
def test_broken_directories(folders, tmp_path, damage, message):
    out = tmp_path / "model"
    shutil.copytree(folders[1], out)
    damage(out)
    with pytest.raises(ValueError) as raised:
        registry.load_model(str(out))
    assert str(raised.value).startswith(str(out))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    time.sleep(0.2)  # those reads end within this test


def test_stored_in_a_dtype_of_others(tmp_path):
    config, params = on_mesh(MOE, 1, 1)
    half = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else leaf.astype("float16"), params)
    orbax_store.save_params(tmp_path / "params", config, half)
    with pytest.raises(ValueError, match=r"params: parameter embed is stored as float16; supported: float32, bfloat16"):
        orbax_store.restore_params(tmp_path / "params", config, cpu_mesh(1, 1))


def test_control_a_flipped_bit_has_another_fingerprint(folders, tmp_path):
    """Parameters are stored uncompressed and without sums; the fingerprint is what tells."""
    out = tmp_path / "model"
    shutil.copytree(folders[1], out)
    file = largest_file(out / "params")
    stored = bytearray(file.read_bytes())
    stored[len(stored) // 2] ^= 1
    file.write_bytes(stored)
    model = registry.load_model(str(out))
    assert fingerprint(model.config, model.params) != model.fingerprint
