"""How a command ends: in one line for a full disk, Ctrl-C and SIGTERM, with a trace for faults of ours."""

import argparse
import errno
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from penelope_jax.experiments import command


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


@pytest.mark.parametrize(
    "command_line", ["synthesize --sessions 2", "scenario tests/golden/figure3_three_of_eight_pages.scenario"]
)
def test_output_into_a_full_device(command_line):
    line = f"{sys.executable} -m penelope_jax.cli {command_line} > /dev/full"
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, text=True, timeout=60, cwd=root)
    assert done.returncode and done.stderr.count("\n") == 1, done.stderr


def test_a_signal_of_which_a_library_made_another_error_is_one(capsys):
    def imported(_args):
        try:
            raise command.Terminated
        except KeyboardInterrupt as stop:
            raise ImportError("initialization failed") from stop

    def called_back(_args):
        raise RuntimeError("INTERNAL: CpuCallback error calling callback: Traceback ... KeyboardInterrupt: ")

    assert (executed(imported), executed(called_back)) == (143, 130)
    assert capsys.readouterr().err == "command: terminated.\ncommand: interrupted.\n"


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


BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def default_signals():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in BOTH}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
