"""Turns a Hugging Face directory into a model directory with Orbax parameters.

The result restores onto any mesh, each device reading its own part; `--model DIR` opens it like any other model. It
works on the CPU in one model's worth of host memory, and ends by reading the result back and comparing fingerprints.

    penelope convert HF_DIR OUT --dtype bfloat16
"""

import argparse
import pathlib

from penelope_jax.errors import bad_input
from penelope_jax.experiments import command

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
    from penelope_jax.models import orbax_store, registry
    from penelope_jax.models.fingerprint import fingerprint

    if not source.is_dir():
        raise ValueError(f"{source}: no such directory.")
    if orbax_store.is_model(source):
        raise ValueError(f"{source}: is converted already ({orbax_store.MARKER_FILE} is there).")
    orbax_store.check_free(out)
    model = registry.load_model(str(source), dtype=dtype)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    written = orbax_store.save_model(out, source, model.config, model.params)
    del model
    again = registry.load_model(str(out))
    found = fingerprint(again.config, again.params)
    if found != written.fingerprint:
        raise ValueError(f"{out}: reads back with fingerprint {found}; {written.fingerprint} was written.")
    return f"{out}: {num_bytes / 1e9:.3f} GB in {written.dtype}, fingerprint {written.fingerprint}, read back equal."


if __name__ == "__main__":
    command.start_module("convert", DESCRIPTION, add_flags, run)
