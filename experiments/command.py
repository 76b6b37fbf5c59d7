"""How a command starts and ends: flags through absl and argparse, one line and exit code 2 for what the user got wrong.

Ctrl-C and SIGTERM where nothing can be kept end in one line too. Anything else that fails is a fault of ours and keeps
its trace.
"""

import argparse
import contextlib
import errno
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from absl import app, flags, logging
from absl.flags import argparse_flags

from penelope_jax.errors import InputError

BAD_INPUT = 2  # exit code
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
CLOSED_PIPE = 141  # exit code, that of a process ended by SIGPIPE
TERMINATED = 143  # exit code after SIGTERM, as shells have it

# What handles a signal where nothing else was chosen; `start` chooses SIG_DFL for both.
_DEFAULT_HANDLERS = {signal.SIGINT: (signal.default_int_handler, signal.SIG_DFL), signal.SIGTERM: (signal.SIG_DFL,)}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAME_MOMENT_S = 0.1  # signals so close were sent together


class Terminated(KeyboardInterrupt):
    """SIGTERM came; what gives way to Ctrl-C gives way to it in the same way."""


class Parser(argparse_flags.ArgumentParser):
    """Reports an error in one line; takes no abbreviated flags."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        self._given = [str(arg) for arg in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:  # for which a flag may have been meant that is misspelt
            options = itertools.takewhile(lambda arg: arg != "--", self._given)
            names = [arg.partition("=")[0] for arg in options if arg.startswith("--")]
            known = {*self._option_string_actions, *(f"--{no}{name}" for name in flags.FLAGS for no in ("", "no"))}
            unknown = [name for name in names if name not in known]
            message += f"; unrecognized: {', '.join(unknown)}" if unknown else ""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def execute(args: argparse.Namespace) -> int:
    """Runs the command in `args.run`; returns its exit code.

    Meanwhile SIGTERM raises `Terminated` as Ctrl-C raises KeyboardInterrupt, and once either has ended the command the
    next one ends the process. A signal that is ignored or handled otherwise stays so.
    """
    ended, raised_s = False, -math.inf

    def handle(number: int, _frame: object) -> None:
        nonlocal raised_s
        # Raising again where the first error passes through would break what tidies up there: locks, for one.
        if time.monotonic() - raised_s < _SAME_MOMENT_S:
            return
        if ended:
            os._exit(128 + number)
        raised_s = time.monotonic()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, defaults in _DEFAULT_HANDLERS.items():
                handler = signal.getsignal(number)
                if handler in defaults:
                    before[number] = handler
                    signal.signal(number, handle)
        code = args.run(args)
        sys.stdout.flush()
        ended = True
        return code
    except InputError as error:
        ended = True
        text = " ".join(str(error).split())
        print(f"{args.prog}: error: {text}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        ended = True
        return _stopped(args, stop)
    except BrokenPipeError:
        ended = True
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        ended = True
        try:
            _flush_output()  # where it is a file that has no room, what was printed is kept
        except OSError:
            _drop_output()
        place = f" {error.filename}" if error.filename else ""
        print(f"{args.prog}: error: cannot write{place}: {error.strerror}.", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        stop = None if raised_s == -math.inf else _signal_behind(error)
        if stop is None:
            raise
        ended = True
        return _stopped(args, stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(args: argparse.Namespace, stop: BaseException) -> int:
    with contextlib.suppress(OSError):
        _flush_output()
    if isinstance(stop, Terminated):
        print(f"{args.prog}: terminated.", file=sys.stderr)
        return TERMINATED
    print(f"{args.prog}: interrupted.", file=sys.stderr)
    return INTERRUPTED


def _signal_behind(error: BaseException) -> BaseException | None:
    """Returns what a signal raised, where a library made another error of it, or None.

    An extension that is being imported makes an ImportError of it; a callback of JAX an error of JAX's runtime whose text
    ends with the trace.
    """
    found = re.search(r"^(?:[\w.]+\.)?(Terminated|KeyboardInterrupt):? *$", str(error), re.MULTILINE)
    if found is not None:
        return Terminated() if found[1] == Terminated.__name__ else KeyboardInterrupt()
    while error.__cause__ is not None:
        error = error.__cause__
        if isinstance(error, KeyboardInterrupt):
            return error
    return None


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """Whoever read the output has seen enough (`| head`); what is left must not be flushed into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come inside are handled at the end: what must not be left half done goes in here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {}
    try:
        for number in _DEFAULT_HANDLERS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def start(parse: Callable[[Sequence[str]], argparse.Namespace], argv: Sequence[str] | None = None) -> NoReturn:
    """Parses `argv` (by default the process's, program name first), runs the command and exits.

    Before and after the command there is nothing to tidy up: Ctrl-C ends the process at once, and prints nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

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
