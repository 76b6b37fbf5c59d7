"""How a command ends: in one line for a full disk, Ctrl-C and SIGTERM, with a trace for faults of ours."""

import argparse
import errno
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from penelope_jax.experiments import command

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def default_signals():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in BOTH}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def executed(run) -> int:
    return command.execute(argparse.Namespace(run=run, prog="command"))


@pytest.mark.parametrize(("name", "text"), [(None, "cannot write"), ("out.json", "cannot write out.json")])
def test_a_full_disk_is_told_in_one_line(capfd, name, text):
    def run(_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    assert executed(run) == command.BAD_INPUT
    assert capfd.readouterr().err == f"command: error: {text}: No space left on device.\n"


def test_other_faults_of_the_system_keep_their_trace():
    def run(_args):
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        executed(run)


def test_a_full_disk_costs_nothing_that_was_printed(tmp_path):
    """Where it is a file that has no room, and output waits in a buffer."""
    code = """
import argparse, errno
from penelope_jax.experiments import command

def run(args):
    print("a table")
    raise OSError(errno.ENOSPC, "No space left on device", "out.json")

raise SystemExit(command.execute(argparse.Namespace(run=run, prog="x")))
"""
    line, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(line, capture_output=True, check=False, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, "a table\n")
    assert done.stderr == "x: error: cannot write out.json: No space left on device.\n"


def test_output_into_a_full_device():
    code = """
import argparse
from penelope_jax.experiments import command

def run(args):
    print("a table")
    return 0

raise SystemExit(command.execute(argparse.Namespace(run=run, prog="x")))
"""
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-c", code]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, check=False, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "x: error: cannot write: No space left on device.\n")


def test_a_signal_of_which_an_import_made_another_error_is_one(capsys, default_signals):
    def imported(_args):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as stop:
            raise ImportError("initialization failed") from stop

    assert executed(imported) == 143
    assert capsys.readouterr().err == "command: terminated.\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_inside_a_callback_of_jax_is_one(capsys, default_signals, number, code):
    def called_back(_args):
        def callback(value):
            signal.raise_signal(number)
            return value

        shape = jax.ShapeDtypeStruct((), np.float32)
        jax.block_until_ready(jax.jit(lambda value: io_callback(callback, shape, value))(np.float32(1)))

    assert executed(called_back) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"command: {'interrupted' if code == 130 else 'terminated'}."


def test_an_error_that_only_names_a_signal_keeps_its_trace():
    def run(_args):
        raise RuntimeError("job 3 failed:\nKeyboardInterrupt: ")

    with pytest.raises(RuntimeError, match="job 3"):
        executed(run)


def test_a_fault_while_giving_way_to_a_signal_keeps_its_trace():
    def fault():
        raise RuntimeError("a fault of ours")

    def run(_args):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            fault()

    with pytest.raises(RuntimeError, match="a fault of ours"):
        executed(run)


def test_signals_are_handled_while_a_command_runs(capsys, default_signals):
    assert executed(lambda _args: signal.raise_signal(signal.SIGTERM)) == command.TERMINATED == 143
    assert executed(lambda _args: signal.raise_signal(signal.SIGINT)) == command.INTERRUPTED == 130
    assert capsys.readouterr().err == "command: terminated.\ncommand: interrupted.\n"
    assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_DFL] * 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert executed(lambda _args: signal.raise_signal(signal.SIGINT) or 0) == 0


def test_signals_wait_for_what_must_not_be_left_half_done(capsys, default_signals):
    done = []

    def run(_args):
        with command.signals_wait():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append("inside")
        done.append("after")

    assert executed(run) == 143 and done == ["inside"]
    assert capsys.readouterr().err == "command: terminated.\n"


def test_signals_sent_together_are_one(capsys, default_signals):
    done = []

    def run(_args):
        signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
        for number in BOTH:
            signal.raise_signal(number)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)
        finally:
            done.append("tidied up")

    assert executed(run) == 130 and done == ["tidied up"]
    assert capsys.readouterr().err == "command: interrupted.\n"
