"""What the flags of `engine_flags.py` make: a trace, a model, an engine configuration, an executor.

Nothing here imports jax before a model is loaded, so that `penelope --help` and bad flags answer at once.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tqdm

import penelope_jax
from penelope_jax import config as config_lib
from penelope_jax.config import EngineConfig, InsertUnit, Policy
from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.traces import ReadOptions, Trace, read_traces

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models.config import ModelConfig
    from penelope_jax.models.registry import LoadedModel

PRESSURE = 0.45  # default device pool, as a share of what the live sessions need in the end
HEADROOM = 1.5  # and at least this many times the longest request
MOST_SESSIONS = 4096  # live at once; each takes rows of every compiled step
PICTURES = (".pdf", ".png", ".svg")
AUTO = "auto"  # of --load-units
MAX_STEP_TOKENS = 8192  # SGLang's prefill chunk, which sets the node size of its tree


class ModelShape(Protocol):
    """What a configuration needs of a model, loaded or not."""

    @property
    def config(self) -> "ModelConfig": ...


def read_options(args: argparse.Namespace, max_context: int | None) -> ReadOptions:
    """Returns how `args` want traces read."""
    with bad_input():
        return ReadOptions(
            scale=args.scale,
            shared_prefix=args.shared_prefix,
            max_context=max_context,
            max_turns=args.max_turns,
            max_delay_s=args.max_delay_s,
            time_scale=args.time_scale,
            subagents=args.subagents,
            skip_bad=args.skip_bad,
        )


def load_trace(args: argparse.Namespace, max_context: int) -> Trace:
    """Reads the traces that `args` name; says on stderr what was left out."""
    with bad_input():
        trace = read_traces(args.trace, read_options(args, max_context))
    for line in (*trace.problems, *trace.duplicates):
        print(f"left out: {line}", file=sys.stderr)
    if trace.problems:
        entries = "1 broken entry" if len(trace.problems) == 1 else f"{len(trace.problems)} broken entries"
        print(f"left out {entries}.", file=sys.stderr)
    return trace


def load_model(args: argparse.Namespace) -> "LoadedModel":
    """Loads the model that `args` name, after the cheap checks of the other flags."""
    check_flags(args)
    data, tensor = mesh_shape(args)
    import jax

    from penelope_jax.models import layers, registry

    if data * tensor > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # too late once devices are in use: then those that are there must do
            jax.config.update("jax_num_cpu_devices", data * tensor)
    with bad_input(f"--mesh {args.mesh}"):
        mesh = layers.device_mesh(data, tensor)
    with bad_input(f"--model, --mesh {args.mesh}" if data * tensor > 1 else "--model"):
        return registry.load_model(args.model, dtype=args.dtype, mesh=mesh, seed=args.seed)


def mesh_shape(args: argparse.Namespace) -> tuple[int, int]:
    """Returns (data, tensor) of `--mesh`. Raises InputError if it is not two numbers of at least 1."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", args.mesh)
    if found is None:
        raise InputError(f"--mesh {args.mesh}: must be two numbers of at least 1 with an x between, as in 1x4.")
    return int(found[1]), int(found[2])


def check_flags(args: argparse.Namespace) -> None:
    """Raises InputError for values that are wrong whatever the model and the trace."""
    with bad_input():
        if args.seed < 0:
            raise ValueError(f"seed={args.seed} must be at least 0.")
        config_lib.check_page_size(args.page_size)
        insert_unit(args)
        mesh_shape(args)
        if not 1 <= args.sessions <= MOST_SESSIONS:
            raise ValueError(f"sessions={args.sessions} must be from 1 to {MOST_SESSIONS}.")
        for name in ("max_context", "max_step_tokens"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        # The rest is checked by the configuration itself; a stand-in pool is used where the real one is not known yet.
        size = args.page_size
        EngineConfig(
            device_tokens=size if args.device_tokens is None else args.device_tokens,
            host_tokens=args.host_tokens,
            swap_tokens=args.swap_tokens,
            prefetch_tokens=args.prefetch_tokens,
            max_moving_tokens=args.max_moving_tokens,
            load_units=load_units(args),
            page_size=size,
            scheduler=args.scheduler,
            max_wait_s=args.max_wait_s,
            max_step_tokens=size if args.max_step_tokens is None else args.max_step_tokens,
        )


def insert_unit(args: argparse.Namespace) -> InsertUnit | None:
    """Returns the insert unit that `args` name, or None. Raises ValueError for one that does not exist."""
    if args.insert_unit is None:
        return None
    known = {unit.value: unit for unit in InsertUnit}
    if args.insert_unit not in known:
        raise ValueError(f"unknown insert_unit={args.insert_unit!r}; known: {', '.join(known)}.")
    return known[args.insert_unit]


def load_units(args: argparse.Namespace) -> float:
    """Returns `--load-units`, 0 for auto: it is measured later. Raises ValueError for what is no number of at least 0."""
    if args.load_units == AUTO:
        return 0.0
    try:
        value = float(args.load_units)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"load_units={args.load_units!r} must be a number of at least 0.")
    return value


def policies(args: argparse.Namespace, names: str) -> list[Policy]:
    """Returns the policies in a comma-separated list, with the insert unit that `args` want."""
    with bad_input():
        unit = insert_unit(args)
        found = [config_lib.policy_named(name.strip()) for name in names.split(",")]
        if len({policy.name for policy in found}) < len(found):
            raise ValueError(f"--policy {names}: a policy is named twice.")
    return [policy if unit is None else dataclasses.replace(policy, insert_unit=unit) for policy in found]


def context_limit(args: argparse.Namespace, model: "LoadedModel") -> int:
    """Returns the longest prompt and reply: `--max-context`, or what the model was made for."""
    limit = model.config.max_context
    if args.max_context is None:
        return limit
    if args.max_context > limit:
        raise InputError(f"--max-context {args.max_context} must be at most {limit}, the context of {model.name}.")
    return args.max_context


def working_set(sessions: Sequence[Session], num_live: int) -> tuple[int, int]:
    """Returns (tokens of the longest request, tokens that `num_live` sessions need in the end).

    What sessions share in front is counted once; of all sessions the `num_live` longest are taken.
    """
    longest = [max(turn.history_len for turn in session.turns) for session in sessions]
    order = sorted(range(len(sessions)), key=lambda i: -longest[i])[:num_live]
    needed, seen = 0, []
    for index in order:
        pieces = sessions[index].turns[0].new
        shared = 0
        for other in seen:
            common = 0
            for mine, theirs in zip(pieces, other, strict=False):
                if mine.label != theirs.label or mine.start != theirs.start:
                    break
                common += min(mine.stop, theirs.stop) - mine.start
                if mine.stop != theirs.stop:
                    break
            shared = max(shared, common)
        seen.append(pieces)
        needed += longest[index] - shared
    return max(longest), needed


def engine_config(
    args: argparse.Namespace, model: ModelShape, sessions: Sequence[Session], policy: Policy, max_context: int
) -> EngineConfig:
    """Returns the configuration for replaying `sessions`; checks that every request fits the pool.

    Raises:
        InputError: a value is wrong, or a request can never run; the message says which.
    """
    size = args.page_size
    longest, needed = working_set(sessions, args.sessions)
    device_tokens = args.device_tokens
    if device_tokens is None:
        device_tokens = whole_pages(max(HEADROOM * longest + size, PRESSURE * needed), size)
    step_tokens = args.max_step_tokens or whole_pages(min(MAX_STEP_TOKENS, max_context), size)
    with bad_input():
        config = EngineConfig(
            device_tokens=device_tokens,
            host_tokens=args.host_tokens,
            swap_tokens=args.swap_tokens,
            prefetch_tokens=args.prefetch_tokens,
            max_moving_tokens=args.max_moving_tokens,
            load_units=load_units(args),
            page_size=size,
            policy=policy,
            scheduler=args.scheduler,
            max_wait_s=args.max_wait_s,
            max_context=max_context,
            max_running=args.sessions,
            max_step_tokens=step_tokens,
            max_step_segments=max(32, 4 * args.sessions),
            linear_cost=model.config.linear_cost,
            vocab_size=model.config.vocab_size,
        )
    from penelope_jax.admission import refusal

    for session in sessions:
        for index, turn in enumerate(session.turns):
            message = refusal(config, turn.prompt_len, turn.output_len)
            if message is not None:
                raise InputError(f"session {session.session_id!r}, turn {index}: {message}")
    return config


def whole_pages(tokens: float, page_size: int) -> int:
    """Returns `tokens` rounded up to whole pages."""
    return math.ceil(tokens / page_size) * page_size


def make_executor(
    model: "LoadedModel", config: EngineConfig, *, num_pages: int | None = None, **options: Any
) -> "JaxExecutor":
    """Returns an executor with room for `config`, or for `num_pages`."""
    import jax

    from penelope_jax.executor import JaxExecutor

    num_pages = num_pages or config.num_device_pages
    with bad_input():
        try:
            # Of two caches a node may be larger than the bound; it then goes alone.
            bound = None if config.policy.inclusive else config.max_moving_pages
            more: dict[str, Any] = {"num_pages": num_pages, "max_moving_pages": bound} | options
            return JaxExecutor.for_engine(config, model.config, model.params, **more)
        except jax.errors.JaxRuntimeError as error:
            tokens = num_pages * config.page_size
            raise ValueError(f"a pool of {tokens} tokens cannot be allocated: {str(error).splitlines()[0]}") from error


def warm_up(executor: "JaxExecutor") -> int:
    """Compiles all that a run needs, with a progress bar on a terminal; returns how many programs."""
    with tqdm.tqdm(desc="compiling", unit="program", leave=False, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return executor.warm_up(progress)


def config_document(config: EngineConfig, **more: Any) -> dict[str, Any]:
    """Returns `config`, and what else was chosen, ready for JSON."""
    document = dataclasses.asdict(config)
    policy = document.pop("policy")
    document["policy"] = policy["name"]
    document["insert_unit"] = policy["insert_unit"].value
    return document | more


def environment() -> dict[str, Any]:
    """Returns commit, jax version and device of this process."""
    import jax

    devices = jax.devices()
    return {"commit": commit(), "jax": jax.__version__, "device": f"{len(devices)} x {devices[0].device_kind}"}


def commit() -> str | None:
    """Returns the commit of the source tree, with a mark when files differ from it; None outside of one."""
    root = pathlib.Path(penelope_jax.__file__).parents[1]
    if not (root / "pyproject.toml").is_file():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def check_output(flag: str, path: str | None) -> None:
    """Raises InputError when a result could not be written to `path`, the value of `flag`, later."""
    if path is None:
        return
    target = pathlib.Path(path)
    if target.is_dir():
        raise InputError(f"{flag} {path}: is a folder.")
    if not target.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {target.parent}.")
    if target.exists() and not target.is_file():
        # Results are written beside their place and then renamed, which would put a file where a device was.
        raise InputError(f"{flag} {path}: is not a file.")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise InputError(f"{flag} {path}: folder {target.parent}: {error.strerror}.") from error


def check_plot(flag: str, path: str | None) -> None:
    """Raises InputError when no picture could be drawn into `path`, the value of `flag`, later."""
    if path is None:
        return
    check_output(flag, path)
    if pathlib.Path(path).suffix.lower() not in PICTURES:
        raise InputError(f"{flag} {path}: must end in one of {', '.join(PICTURES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{flag} needs matplotlib; install it with: pip install 'penelope_jax[report]'.")


def numbers(flag: str, text: str) -> list[int]:
    """Returns the numbers in `text`, the value of `flag`. Raises InputError unless each is at least 1."""
    if not re.fullmatch(r"[1-9]\d{0,8}( *, *[1-9]\d{0,8})*", text):
        raise InputError(f"{flag} {text}: must be numbers of at least 1 with commas between.")
    return [int(part) for part in text.split(",")]
