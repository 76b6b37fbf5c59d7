"""How a command starts and ends: flags through absl and argparse, one line and exit code 2 for what the user got wrong.

Ctrl-C where nothing can be kept ends in one line too. Anything else that fails is a fault of ours and keeps its trace.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging
from absl.flags import argparse_flags

from penelope_jax.errors import InputError

BAD_INPUT = 2  # exit code
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
CLOSED_PIPE = 141  # exit code, that of a process ended by SIGPIPE


class Parser(argparse_flags.ArgumentParser):
    """Reports an error in one line; takes no abbreviated flags."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def execute(args: argparse.Namespace) -> int:
    """Runs the command in `args.run`; returns its exit code."""
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except InputError as error:
        text = " ".join(str(error).split())
        print(f"{args.prog}: error: {text}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{args.prog}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`); what is left must not be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def start(parse: Callable[[Sequence[str]], argparse.Namespace], argv: Sequence[str] | None = None) -> NoReturn:
    """Parses `argv` (by default the process's, program name first), runs the command and exits."""

    def parse_quietly(argv: Sequence[str]) -> argparse.Namespace:
        args = parse(argv)
        if flags.FLAGS["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING  # absl would choose INFO
        return args

    app.run(execute, argv=list(sys.argv if argv is None else argv), flags_parser=parse_quietly)
    raise AssertionError("app.run exits")


def start_module(
    prog: str,
    description: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> NoReturn:
    """Starts one command on its own, for `python -m`."""

    def parse(argv: Sequence[str]) -> argparse.Namespace:
        parser = Parser(prog=prog, description=description)
        add_flags(parser)
        parser.set_defaults(run=run, prog=prog)
        return parser.parse_args(list(argv[1:]))

    start(parse)
