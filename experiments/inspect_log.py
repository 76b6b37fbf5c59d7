"""`penelope inspect`: any past state of a run from its event log, what changed between two, and when something happened.

Everything is made again from the log, and each plan on the way is compared with the one that was logged.
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Iterator

from penelope_jax.errors import InputError
from penelope_jax.event_log import Planned, read_events
from penelope_jax.events import Submit
from penelope_jax.experiments import command, log_query, log_text
from penelope_jax.experiments.log_conversations import Conversations
from penelope_jax.experiments.log_query import Occurrence
from penelope_jax.log_replay import LogReplay, Moment, no_such_step
from penelope_jax.segments import StepDone

END = "end"


class Inspection:
    """A log replayed moment by moment, with the conversations in it."""

    def __init__(self, path: str):
        self.path = path
        self.replay = LogReplay(path)
        self.conversations = Conversations()

    def until(self, step: int | None = None) -> Iterator[Moment]:
        """Yields the moments up to the one in which a step is planned; None: all, and then says if the log has no end.

        Raises:
            InputError: there is no such step, or the log is damaged before it.
        """
        try:
            for moment in self.replay:
                self.conversations.see(moment)
                yield moment
                if step is not None and moment.planned_step == step:
                    return
        except InputError as error:
            raise InputError(f"{error} The last step before it is {self.replay.last_step}.") from error
        if step is not None:
            raise no_such_step(self.path, step, self.replay)
        if not self.replay.complete:
            print(self.replay.ending, file=sys.stderr)


def show_step(path: str, step: int | None, pages: bool) -> list[str]:
    """Returns the text of the state right after a step was planned; None: at the end of the log."""
    inspection = Inspection(path)
    last = collections.deque(inspection.until(step), maxlen=1)
    if not last:
        return [f"{path}: nothing has happened yet."]
    (moment,) = last
    state = moment.after
    if step is None:
        lines = [f"{path}: the end, after step {inspection.replay.last_step}, {state.now_s:.3f} s"]
    else:
        lines = [f"{path}: step {step} is planned, {state.now_s:.3f} s"]
        lines += log_text.plan_lines(moment, inspection.conversations)
    if pages:
        return lines + log_text.page_lines(state)
    return lines + log_text.state_lines(state, inspection.conversations)


def show_diff(path: str, first: int, second: int) -> list[str]:
    """Returns what changed from the state after one step was planned to that after a later one."""
    if first >= second:
        raise InputError(f"--diff {first} {second}: the first step must be before the second.")
    inspection = Inspection(path)
    (before,) = collections.deque(inspection.until(first), maxlen=1)
    happened: list[Occurrence] = []
    after = before
    for after in inspection.until(second):
        happened.extend(log_query.occurrences(after, inspection.conversations))
    lines = [f"{path}: from step {first} to step {second}, {after.after.now_s - before.after.now_s:.3f} s"]
    return lines + log_text.diff_lines(before.after, after.after, happened, inspection.conversations)


def show_found(path: str, query: str) -> Iterator[str]:
    """Yields a line for each occurrence that a query matches, and how many there were."""
    wanted = log_query.parse_query(query)
    inspection = Inspection(path)
    number = 0
    for moment in inspection.until():
        for occurrence in log_query.occurrences(moment, inspection.conversations):
            if wanted.matches(occurrence):
                number += 1
                yield str(occurrence)
    yield f"{number} found."


@dataclasses.dataclass(slots=True)
class _Session:
    num_requests: int = 0
    first_step: int = 0
    last_step: int = 0
    prompt_len: int = 0


def show_list(path: str) -> Iterator[str]:
    """Yields an overview of a log, which is read and not replayed."""
    header, entries = read_events(path)
    config = header.config
    yield f"{path}: event log"
    yield "run: " + ", ".join(f"{name} {value}" for name, value in header.run.items())
    host = f" and {config.num_host_pages} + {config.num_swap_pages} host pages" if config.num_host_pages else ""
    yield (
        f"engine: {config.policy.name}, {config.num_device_pages} pages of {config.page_size} tokens{host}, "
        f"{config.scheduler}, context {config.max_context}, {config.max_running} running, steps of {config.max_step_tokens} tokens"
    )
    kinds: collections.Counter[str] = collections.Counter()
    sessions: collections.defaultdict[str, _Session] = collections.defaultdict(_Session)
    num_steps, num_outputs, times = 0, 0, []
    damage: InputError | None = None
    try:
        for kind, entry in entries:
            kinds[kind] += 1
            if isinstance(entry, Planned):
                num_steps += entry.step is not None
                continue
            times = [*times[:1], entry.time_s]
            if isinstance(entry, StepDone):
                num_outputs += len(entry.tokens)
            elif isinstance(entry, Submit):
                session = sessions[entry.session_id]
                session.first_step = session.first_step if session.num_requests else num_steps
                session.num_requests += 1
                session.last_step, session.prompt_len = num_steps, entry.tokens.size
    except InputError as error:
        damage = error
    yield "entries: " + (", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "none")
    duration = f", {times[-1] - times[0]:.3f} s" if times else ""
    yield f"steps: {num_steps}, {num_outputs} tokens sampled{duration}"
    for name, session in sessions.items():
        yield (
            f"{f'session {name}' if name else 'no session'}: {log_query.counted(session.num_requests, 'request')} "
            f"before steps {session.first_step} to {session.last_step}, the last of {session.prompt_len} tokens"
        )
    if damage is not None:
        raise damage
    yield entries.ending


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("file", metavar="FILE", help="an event log, as `penelope replay --event-log` writes it")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--step", type=_step_or_end, metavar="N|end", help="the state right after step N was planned")
    action.add_argument("--diff", type=_step, nargs=2, metavar=("N", "M"), help="what changed from step N to step M")
    action.add_argument(
        "--find",
        metavar="QUERY",
        help=f"when something happened: {', '.join(log_query.KINDS)}; then session=NAME, request=N, step=N",
    )
    action.add_argument("--list", action="store_true", help="an overview; reads the log and replays nothing")
    parser.add_argument("--pages", action="store_true", help="with --step: page by page, as `penelope scenario` prints")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number.")
    return int(text)


def _step_or_end(text: str) -> int | str:
    return END if text == END else _step(text)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if args.pages and args.step is None:
        raise InputError("--pages goes with --step.")
    if args.step is not None:
        lines = show_step(args.file, None if args.step == END else args.step, args.pages)
    elif args.diff is not None:
        lines = show_diff(args.file, *args.diff)
    elif args.find is not None:
        lines = show_found(args.file, args.find)
    else:
        lines = show_list(args.file)
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    command.start_module("inspect_log", "Prints past states of a run from its event log.", add_flags, run)
