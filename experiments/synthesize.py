"""Draws synthetic agent sessions that have the shape of recorded ones.

Every quantity is drawn from quantiles measured on recorded coding-agent sessions (676 conversations, 44,082 requests),
interpolated on a log scale. A session: a prefix shared by all, a first prompt, then turns that add a tool result or a
human message behind the reply. Now and then a turn diverges: the client edited its recent history, or compacted it to
the shared prefix and a summary.

    python -m penelope_jax.experiments.synthesize --sessions 4 --turns 40 --context 2048 --scale 16 --out trace.jsonl
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from penelope_jax.errors import bad_input
from penelope_jax.experiments import command
from penelope_jax.experiments.engine_options import check_output
from penelope_jax.experiments.sessions import Piece, Session, Turn
from penelope_jax.experiments.traces import write_jsonl

Quantiles = tuple[tuple[float, float], ...]

# (probability, value); the outermost values are ours, they bound the tails.
FIRST_PROMPT: Quantiles = ((0.0, 15_800), (0.1, 17_400), (0.5, 20_200), (0.75, 26_200), (0.95, 40_900), (1.0, 84_000))
ADDED: Quantiles = (  # tokens of a prompt behind its common prefix with the one before: the reply and what is new
    (0.0, 60),
    (0.25, 370),
    (0.5, 710),
    (0.75, 1_719),
    (0.9, 4_268),
    (0.95, 8_272),
    (1.0, 24_000),
)
OUTPUT: Quantiles = ((0.0, 40), (0.1, 104), (0.5, 217), (0.9, 879), (0.99, 3_668), (1.0, 8_000))
TOOL_DELAY_S: Quantiles = ((0.0, 1), (0.25, 5), (0.5, 9), (0.75, 20), (0.9, 77), (0.99, 908), (1.0, 1_800))
HUMAN_DELAY_S: Quantiles = ((0.0, 4), (0.25, 23), (0.5, 91), (0.75, 319), (0.9, 1_179), (0.99, 6_502), (1.0, 13_000))
TURNS: Quantiles = ((0.0, 1), (0.1, 3), (0.25, 18), (0.5, 44), (0.75, 90), (0.9, 147), (1.0, 330))

_MIN_NEW = 24  # tokens: the smallest tool result
_OUTPUT_CORRELATION = 0.5  # of a turn's reply with what the next prompt adds; keeps replies below it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SynthesisOptions:
    """What to draw.

    Attributes:
        sessions: how many.
        turns: requests of every session; None: drawn.
        context: a session ends before its prompt and reply exceed this many (scaled) tokens.
        scale: a power of two; every token count is divided by it.
        shared_prefix: tokens (before scaling) that all sessions share.
        human_share: share of the requests that follow a human turn, not a tool result.
        divergence_rate: share of the requests that diverge from the history.
        compaction_share: share of those that are compactions.
        side_rate: share of the turns after which a side request forks off within the history and is cancelled after
            `side_cancel_s`; the next turn follows at once and does not build on it.
        seed: same options and seed, same sessions.
    """

    sessions: int = 4
    turns: int | None = None
    context: int = 131_072
    scale: int = 1
    shared_prefix: int = 15_000
    human_share: float = 0.15
    divergence_rate: float = 0.022
    compaction_share: float = 0.25
    side_rate: float = 0.0
    side_cancel_s: float = 2.0
    seed: int = 0

    def __post_init__(self):
        for name in ("sessions", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.turns is not None and self.turns < 1:
            raise ValueError(f"turns={self.turns} must be at least 1.")
        if self.scale < 1 or self.scale > 64 or self.scale & (self.scale - 1):
            raise ValueError(f"scale={self.scale} must be a power of two from 1 to 64.")
        if self.shared_prefix < 0 or self.seed < 0:
            raise ValueError(f"shared_prefix={self.shared_prefix} and seed={self.seed} must be at least 0.")
        if not self.side_cancel_s > 0:
            raise ValueError(f"side_cancel_s={self.side_cancel_s} must be above 0.")
        for name in ("human_share", "divergence_rate", "compaction_share", "side_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1].")


def quantile(quantiles: Quantiles, probability: float) -> float:
    """Returns the value at `probability` in [0, 1], interpolated on a log scale."""
    points, values = zip(*quantiles, strict=True)
    return float(np.exp(np.interp(probability, points, np.log(values))))


def synthesize(options: SynthesisOptions) -> tuple[Session, ...]:
    """Returns sessions drawn as `options` say; each session depends on the seed and its index only.

    Raises:
        ValueError: the context is too small for a first prompt.
    """
    return tuple(_draw_session(options, index) for index in range(options.sessions))


def _draw_session(options: SynthesisOptions, index: int) -> Session:
    rng, side_rng = (np.random.default_rng((options.seed, index, *more)) for more in ((), (1,)))
    name = f"agent-{options.seed}-{index}"

    def scaled(tokens: float) -> int:
        return max(1, round(tokens / options.scale))

    shared_len = options.shared_prefix // options.scale
    wanted = options.turns or round(quantile(TURNS, rng.random()))
    turns: list[Turn] = []
    main = 0  # index of the last turn that was no side request
    for number in range(wanted):
        added_u, output_u = _correlated(rng, _OUTPUT_CORRELATION)
        output_len = scaled(quantile(OUTPUT, output_u))
        own = f"{name}/{number}"
        if number == 0:
            private = max(_MIN_NEW, quantile(FIRST_PROMPT, rng.random()) - options.shared_prefix)
            turn = _fresh(shared_len, own, scaled(private), output_len, -1, 0.0, "human")
            if turn.history_len > options.context:
                turn = _fit(turn, shared_len, own, options.context)
        else:
            before = turns[main]
            human = rng.random() < options.human_share
            delays = HUMAN_DELAY_S if human else TOOL_DELAY_S
            delay_s, kind = round(quantile(delays, rng.random()), 1), "human" if human else "tool"
            diverges, compacts, edit_u = (
                rng.random() < options.divergence_rate,
                rng.random() < options.compaction_share,
                rng.random(),
            )
            added = scaled(quantile(ADDED, added_u))
            if diverges and compacts:
                summary = scaled(max(_MIN_NEW, quantile(ADDED, 0.5 + added_u / 2)))
                turn = _fresh(shared_len, own, summary, output_len, main, delay_s, kind)
            elif diverges:
                private = before.prompt_len - shared_len
                keep = before.prompt_len - int(private * edit_u / 4)
                turn = _turn(main, keep, own, added, output_len, delay_s, kind)
            else:
                new_len = max(scaled(_MIN_NEW), added - before.output_len)
                turn = _turn(main, before.history_len, own, new_len, output_len, delay_s, kind)
        if turn.history_len > options.context:
            break
        if number and side_rng.random() < options.side_rate:
            side = _side(turns[main], main, shared_len, own, scaled(_MIN_NEW), side_rng.random())
            turns.append(dataclasses.replace(side, delay_s=turn.delay_s, cancel_s=options.side_cancel_s))
            turn = dataclasses.replace(turn, delay_s=0.0)
        main = len(turns)
        turns.append(turn)
    return Session(session_id=name, turns=tuple(turns))


def _turn(base: int, keep: int, label: str, new_len: int, output_len: int, delay_s: float, kind: str) -> Turn:
    new = (Piece(label, 0, new_len),)
    return Turn(base=base, keep=keep, new=new, output_len=output_len, delay_s=delay_s, kind=kind)


def _side(before: Turn, base: int, shared_len: int, label: str, new_len: int, place: float) -> Turn:
    """Returns a side request that forks off in the second half of the private history of `before`."""
    private = before.prompt_len - shared_len
    keep = before.prompt_len - int(private * place / 2)
    return _turn(base, keep, f"{label}/side", new_len, 1, 0.0, "tool")


def _fresh(
    shared_len: int, label: str, private_len: int, output_len: int, base: int, delay_s: float, kind: str
) -> Turn:
    """Returns a turn that starts over behind the shared prefix."""
    if base >= 0:
        return _turn(base, shared_len, label, private_len, output_len, delay_s, kind)
    shared = (Piece("shared", 0, shared_len),) if shared_len else ()
    new = (*shared, Piece(label, 0, private_len))
    return Turn(base=-1, keep=0, new=new, output_len=output_len, delay_s=delay_s, kind=kind)


def _fit(turn: Turn, shared_len: int, label: str, context: int) -> Turn:
    """Returns a first turn with its private part cut to the context."""
    private_len = context - shared_len - turn.output_len
    if private_len < 1:
        raise ValueError(
            f"context={context} (scaled tokens) is too small: the shared prefix has {shared_len} and the first reply "
            f"{turn.output_len}."
        )
    return _fresh(shared_len, label, private_len, turn.output_len, -1, turn.delay_s, turn.kind)


def _correlated(rng: np.random.Generator, correlation: float) -> Sequence[float]:
    """Returns two uniform draws whose normal scores have `correlation`."""
    first, second = rng.standard_normal(2)
    second = correlation * first + (1 - correlation**2) ** 0.5 * second
    normal = statistics.NormalDist()
    return normal.cdf(first), normal.cdf(second)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    default = SynthesisOptions()
    parser.add_argument("--out", required=True, metavar="FILE", help="a .jsonl or .jsonl.gz file")
    parser.add_argument("--sessions", type=int, default=default.sessions, metavar="N", help="how many (4)")
    parser.add_argument("--turns", type=int, metavar="N", help="requests of each session; default: drawn")
    parser.add_argument("--context", type=int, default=default.context, metavar="N", help="a session ends before it")
    parser.add_argument("--scale", type=int, default=default.scale, metavar="K", help="divide token counts by K")
    parser.add_argument(
        "--shared-prefix", type=int, default=default.shared_prefix, metavar="N", help="tokens shared, before scaling"
    )
    parser.add_argument("--human-share", type=float, default=default.human_share, metavar="X")
    parser.add_argument("--divergence-rate", type=float, default=default.divergence_rate, metavar="X")
    parser.add_argument("--compaction-share", type=float, default=default.compaction_share, metavar="X")
    parser.add_argument(
        "--side-rate", type=float, default=default.side_rate, metavar="X", help="share of turns with a side request (0)"
    )
    parser.add_argument(
        "--side-cancel-s", type=float, default=default.side_cancel_s, metavar="S", help="when it is cancelled (2)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    check_output("--out", args.out)
    with bad_input():
        if not args.out.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"--out {args.out}: the name must end in .jsonl or .jsonl.gz.")
        names = [field.name for field in dataclasses.fields(SynthesisOptions)]
        options = SynthesisOptions(**{name: getattr(args, name) for name in names})
        sessions = synthesize(options)
        write_jsonl(sessions, args.out)
    num_requests = sum(len(session.turns) for session in sessions)
    longest = max(turn.history_len for session in sessions for turn in session.turns)
    print(f"{args.out}: {len(sessions)} sessions, {num_requests} requests, longest history {longest:,} tokens.")
    return 0


if __name__ == "__main__":
    command.start_module("synthesize", "Draw agent sessions and write them as a trace.", add_flags, run)
