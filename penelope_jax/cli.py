"""The command line: `penelope COMMAND ...`.

Each command is a module of `penelope_jax.experiments` with `add_flags(parser)` and `run(args) -> exit code`, imported
only when it is the one that runs. `scenario` has `main(file)` in their place.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import NoReturn

import penelope_jax
from penelope_jax.errors import bad_input
from penelope_jax.experiments import command

COMMANDS: tuple[tuple[str, str], ...] = (
    ("replay", "replay agent sessions on the real engine, in real time, under one policy or several"),
    ("simulate", "play agent sessions on a device that is a cost model, under one policy or several"),
    ("verify", "compare a small cache with one that never evicts, bit by bit"),
    ("scenario", "run a script that drives the cache, and print the tree after each step"),
    ("synthesize", "draw agent sessions and write them as a trace"),
    ("convert", "turn a Hugging Face directory into one that each device of a mesh reads its own part of"),
    ("inspect", "rebuild past states of a run from its event log, and find out when something happened"),
)
_MODULES = {"inspect": "inspect_log"}  # where the command's name would hide a module of Python's


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses `argv`, program name first."""
    parser = command.Parser(prog="penelope", description="Serving engine for agentic LLM traffic in JAX.")
    parser.add_argument("--version", action="version", version=f"penelope_jax {penelope_jax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=command.Parser)
    wanted = next((arg for arg in argv[1:] if not arg.startswith("-")), None)
    for name, text in COMMANDS:
        subparser = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", inherited_absl_flags=None
        )
        if name == "scenario":
            subparser.add_argument("file", metavar="FILE", help="the script")
            subparser.set_defaults(run=_run_scenario, prog=f"penelope {name}")
        elif name == wanted:
            module = importlib.import_module(f"penelope_jax.experiments.{_MODULES.get(name, name)}")
            module.add_flags(subparser)
            subparser.set_defaults(run=module.run, prog=f"penelope {name}")
    return parser.parse_args(list(argv[1:]))


def _run_scenario(args: argparse.Namespace) -> int:
    from penelope_jax.experiments import scenario

    with bad_input():
        return scenario.main(args.file) or 0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `argv`, by default the process's, and exits."""
    command.start(parse, argv)


if __name__ == "__main__":
    main()
