"""Turns a Hugging Face directory into a model directory with Orbax parameters.

The result restores onto any mesh; `--model DIR` opens it like any other model. What is stored is cut by layer and for
8 devices, so that each reads its own part and nothing else. It works on the CPU, in host memory for one model, a few
GB and the largest parameter, and ends by reading the result back and comparing fingerprints.

    penelope convert HF_DIR OUT --dtype bfloat16
"""

import argparse
import contextlib
import os
import pathlib
import shutil
from typing import TYPE_CHECKING

from penelope_jax.errors import bad_input
from penelope_jax.experiments import command

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from penelope_jax.models.config import ModelConfig

MOST_SHARDS = 8
DESCRIPTION = "Convert a Hugging Face directory (safetensors) to a model directory with Orbax parameters."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    parser.add_argument("source", metavar="HF_DIR", help="directory with config.json and safetensors")
    parser.add_argument("out", metavar="OUT", help="new directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the result; default: what the files say")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    with bad_input():
        text = convert(pathlib.Path(args.source), pathlib.Path(args.out), args.dtype)
    print(text)
    return 0


def convert(source: pathlib.Path, out: pathlib.Path, dtype: str | None = None) -> str:
    """Converts `source` to `out`; returns a line that says what was written.

    Raises:
        ValueError: `source` cannot be read or is converted already, `out` is something, or it does not read back.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # parameters need not fit an accelerator
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # jax is running already
            jax.config.update("jax_num_cpu_devices", MOST_SHARDS)
    from penelope_jax.models import orbax_store, registry
    from penelope_jax.models.config import from_hf_config, read_json
    from penelope_jax.models.fingerprint import fingerprint

    if not source.is_dir():
        raise ValueError(f"{source}: no such directory.")
    if orbax_store.is_model(source):
        raise ValueError(f"{source}: is converted already ({orbax_store.MARKER_FILE} is there).")
    orbax_store.check_free(out)
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.absolute().parent}.")
    path = source / "config.json"
    mesh = _widest_mesh(from_hf_config(read_json(path), str(path)))
    model = registry.load_model(str(source), dtype=dtype, mesh=mesh)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    # Apart until it is whole: half a model must not look like one, nor stand in the way of the next try. Inside, since
    # `out` may be where another disk is mounted.
    made = not out.exists()
    out.mkdir(exist_ok=True)
    part = out / f".{os.getpid()}.part"
    try:
        written = orbax_store.save_model(part, source, model.config, model.params)
        del model
        again = registry.load_model(str(part), mesh=mesh)
        found = fingerprint(again.config, again.params)
        if found != written.fingerprint:
            raise ValueError(f"{out}: reads back with fingerprint {found}; {written.fingerprint} was written.")
        with command.signals_wait():
            for path in sorted(part.iterdir(), key=lambda path: path.name == orbax_store.MARKER_FILE):
                path.replace(out / path.name)
    finally:
        with command.signals_wait():
            shutil.rmtree(part, ignore_errors=True)
            if made and not any(out.iterdir()):
                out.rmdir()
    return (
        f"{out}: {num_bytes / 1e9:.3f} GB in {written.dtype}, cut for {mesh.size} devices, fingerprint "
        f"{written.fingerprint}, read back equal."
    )


def _widest_mesh(config: "ModelConfig") -> "Mesh":
    """Returns a mesh of CPU devices, as many along `tensor` as the model can be cut for without copies."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from penelope_jax.models import layers

    devices = np.array(jax.devices("cpu"))
    for tensor in range(min(len(devices), MOST_SHARDS), 0, -1):
        mesh = Mesh(devices[:tensor].reshape(1, tensor), layers.MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))
        with contextlib.suppress(ValueError):  # does not divide
            layers.parameter_shardings(config, mesh)
            return mesh
    raise AssertionError("one device divides everything")


if __name__ == "__main__":
    command.start_module("convert", DESCRIPTION, add_flags, run)
