"""`penelope scenario FILE`: runs a script that drives the cache and prints the tree after each step.

A script is lines of commands. Each is printed with what it did and the state after it below it, or `(as before)`;
`render` says how to read the tree. There `A` is a page on the device, `Aₕ` one on the host, `A↓` one on its way to the
host, `A↑` one on its way back, `A+ₕ` one on the device with a copy on the host, and `_` a missing one.

A history is written in letters, `S|A B x y`: a capitalised word is one page, any other word one token, and `|`, `[`, `]`
mean nothing. `#` starts a comment. Examples are in `tests/golden/`.

    cache [pages=16 page_size=4 policy=penelope scheduler=lpm step_tokens= ...]     a new engine; the first command
          [host=PAGES swap=1 prefetch=0 moving=PAGES load_units=UNITS moves=auto|manual]     with a host tier

    insert HISTORY [from=POSITION] [salt=]      match HISTORY [salt=]      touch HISTORY [salt=]
    pin NAME HISTORY [salt=]                    unpin NAME                 evict NUMBER [policy=]
    take NAME NUMBER                            free NAME ...              save NAME, restore NAME
    load HISTORY [most=] [salt=]                demote NUMBER [policy=]

    submit NAME HISTORY [max_tokens=1|most] [stop=TOKEN,...] [outputs=TOKEN,...] [salt=] [logprobs_from=]
    plan        plans a step and starts it      done        the oldest step in flight comes back
    step        plan, then done for all         run         steps until no request is left
    abort NAME                                  flush
    moved [NUMBER ...]      moves arrive, all of them when no number is given; with moves=auto they do before each plan
    fails [NUMBER ...]      moves end, and nothing has moved
    time SECONDS    what comes from now on comes then: the engine learns the time from what comes

    repeat NUMBER COMMAND ...       the command that many times, `{n}` in it being 1, 2, ...

    expect free|resident|evictable|nodes|pins NUMBER            expect tree HISTORY, ... [salt=]
    expect order HISTORY, ...   (evictable, oldest first)       expect running|waiting NAME ...
    expect hits NAME 8 hit, 4 host hit, 4 refilled, 1 new       expect row NAME PAGE_ID ...
    expect count evicted_pages NUMBER   (or another of the engine's counters)
    expect host_free|on_host|copies NUMBER                      expect device_order HISTORY, ...   (next to be demoted)
    expect under_way NUMBER ...   (of moves)
    and of the last command: expect unchanged | hit NUMBER | matched 0-4 device, 4-8 missing, ... | adopted NUMBER |
    returned NUMBER | evicted PAGE ... | short NUMBER | plan r1 phantom 4-12, r1 real 16-17 sample, ... |
    moves demote A B, load C for r1 swapped 1, prefetch D for r2, ... | retracted NAME ... |
    updates r1 sampled x at 9, r1 finished by length, ... | refusal TEXT | error TEXT

`nothing` stands for an empty list. An expectation that does not hold ends the script, as does an error that no `expect
error` follows, and a broken invariant, which is looked for after every command.

    python -m penelope_jax.experiments.scenario --update FILE...

writes what each script prints to FILE.expected, which is how the expected texts of `tests/golden/` are made.
"""

import argparse
import pathlib
import sys

from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments import command, scenario_cache, scenario_engine
from penelope_jax.experiments.scenario_expect import NotAsExpected, expect
from penelope_jax.experiments.scenario_language import Line, read_line, whole
from penelope_jax.experiments.scenario_world import Command, World

COMMANDS = scenario_cache.COMMANDS | scenario_engine.COMMANDS
COUNT = "{n}"


class ScenarioFailed(Exception):
    """Something does not hold. `output` is what was printed up to there."""

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output


def run_text(source: str, name: str) -> str:
    """Runs a script.

    Args:
        source: its text.
        name: its name in errors.

    Returns:
        The script with what each command did, and the state after it, below the command.

    Raises:
        InputError: a line cannot be understood.
        ScenarioFailed: an expectation or an invariant does not hold, or a command fails unexpectedly.
    """
    said: list[str] = []
    world: World | None = None
    number = 0
    unexpected = ""  # the error of the last command, as long as no `expect error` has followed
    try:
        for number, text in enumerate(source.splitlines(), 1):
            line = read_line(text, f"{name}:{number}")
            if unexpected and line is not None and not _expects_error(line):
                raise ScenarioFailed(unexpected, "\n".join(said))
            said.append(text.rstrip())
            if line is None:
                continue
            if line.command == "cache":
                world = World(line)
            elif world is None:
                raise InputError(f"{line.place}: the first command must be cache, got {line.command!r}.")
            elif line.command == "expect":
                expect(world, line)
                unexpected = ""
            else:
                said.extend(f"    {result}" for result in _do(world, line))
                unexpected = world.outcome.error and f"{line.place}: {world.outcome.error}"
        if world is not None:
            world.check_past()
    except (NotAsExpected, AssertionError) as error:
        raise ScenarioFailed(f"{name}:{number}: {error}", "\n".join(said)) from error
    if unexpected:
        raise ScenarioFailed(unexpected, "\n".join(said))
    return "\n".join(said) + "\n"


def _expects_error(line: Line) -> bool:
    return line.command == "expect" and line.text.partition(" ")[0] == "error"


def _do(world: World, line: Line) -> list[str]:
    if line.command == "repeat":
        return world.do(_repeat, line)
    return world.do(_checked(line), line)


def _checked(line: Line) -> Command:
    if line.command not in COMMANDS:
        known = ", ".join(("cache", "expect", "repeat", *COMMANDS))
        raise InputError(f"{line.place}: unknown command {line.command!r}; known: {known}.")
    run, options = COMMANDS[line.command]
    line.only(options)
    return run


def _repeat(world: World, line: Line) -> list[str]:
    """`repeat NUMBER COMMAND ...`: runs a command that many times, `{n}` in it being 1, 2, ..."""
    times, _, repeated = line.text.partition(" ")
    name, _, text = repeated.partition(" ")
    if name not in COMMANDS:
        raise InputError(f"{line.place}: {name!r} cannot be repeated; what can: {', '.join(COMMANDS)}.")
    said: list[str] = []
    for number in range(1, whole(times, f"{line.place}: repeat") + 1):
        options = {option: value.replace(COUNT, str(number)) for option, value in line.options.items()}
        once = Line(line.place, name, text.replace(COUNT, str(number)), options)
        said.extend(_checked(once)(world, once))
        world.check()
    return said


def run_file(path: str) -> str:
    """Runs a script from a file; see `run_text`."""
    with bad_input():
        source = pathlib.Path(path).read_text(encoding="utf-8")
    return run_text(source, path)


def main(path: str) -> int:
    """Runs a script and prints it; returns the exit code: 1 when something in it does not hold."""
    try:
        print(run_file(path), end="")
    except ScenarioFailed as error:
        print(error.output)
        print(error, file=sys.stderr)
        return 1
    return 0


def expected_path(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the file beside a script that holds the text it must print."""
    return pathlib.Path(path).with_suffix(".expected")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="scripts")
    parser.add_argument("--update", action="store_true", help="write what each prints to FILE.expected")


def _run(args: argparse.Namespace) -> int:
    if not args.update:
        return max(main(path) for path in args.files)
    for path in args.files:
        try:
            expected_path(path).write_text(run_file(path), encoding="utf-8")
        except ScenarioFailed as error:
            print(error.output)
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    command.start_module("scenario", "Runs cache scripts.", _add_flags, _run)
