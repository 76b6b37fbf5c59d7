"""`penelope simulate`: a trace under one policy or several, by the serving code on a device that is a cost model.

The engine, its driver and the closed loop are those that serve; only the executor differs: it says how long a step
and a copy would take (`step_time.py`) and moves a virtual clock. So a simulation tells how often something is
recomputed exactly, and how long that takes as well as the cost model does.

Flags and results count tokens of the trace. With --scale K the simulator takes K tokens as one. Page borders and chunks
stay where they are, but prompts and outputs are cut to multiples of K, a decode row takes K tokens of a step's budget,
and whoever arrives while others decode waits for K of their steps, which adds the same to every policy's times and so
makes them more alike. Like decode steps are counted at once anyway (`decode_runs.py`), so K = 1 is seldom much slower.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from penelope_jax.config import EngineConfig, Policy
from penelope_jax.device_profiles import PROFILES, DeviceProfile, profile_named
from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments import engine_flags, engine_options, simulation_tables
from penelope_jax.experiments.command import INTERRUPTED
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.simulation import Simulation, run_simulation, summary
from penelope_jax.experiments.traces import Trace
from penelope_jax.metrics import write_json, write_records
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.model_costs import model_costs
from penelope_jax.models.presets import PRESETS
from penelope_jax.step_time import ModelCosts, StepTimer, scaled_linear_cost

MAX_CONTEXT = 131_072  # Qwen3 with YaRN; --max-context changes it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedModel:
    """A model without weights; what `engine_options` wants of one."""

    name: str
    config: ModelConfig


def sample_sessions(sessions: Sequence[Session], number: int, seed: int) -> tuple[Session, ...]:
    """Returns `number` different sessions, drawn in a random order that depends on `seed` and how many there are.

    Raises:
        ValueError: there are fewer.
    """
    if not 1 <= number <= len(sessions):
        raise ValueError(f"sample={number} must be from 1 to {len(sessions)}, the sessions of the trace.")
    order = np.random.default_rng(seed).permutation(len(sessions))
    return tuple(sessions[index] for index in order[:number].tolist())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is simulated: a model on a device, and how the engine is set up there. `args` count simulated tokens."""

    args: argparse.Namespace
    model: SimulatedModel
    costs: ModelCosts
    device: DeviceProfile
    timer: StepTimer
    max_context: int

    def engine_config(self, sessions: Sequence[Session], policy: Policy) -> EngineConfig:
        """Returns the configuration for playing `sessions`.

        Raises:
            InputError: a value is wrong, or a request can never run; the message says which.
        """
        config = engine_options.engine_config(self.args, self.model, sessions, policy, self.max_context)
        scale = self.timer.scale
        return dataclasses.replace(
            config,
            linear_cost=scaled_linear_cost(config.linear_cost, scale),
            output_reserve=max(1, config.output_reserve // scale),
        )

    def document(self, config: EngineConfig, num_sessions: int) -> dict[str, Any]:
        """Returns the `config` of the JSON document: in tokens and units of the trace."""
        scale = self.timer.scale
        document = engine_options.config_document(config, model=self.model.name, sessions=num_sessions)
        for name in (*_SCALED_FLAGS, "output_reserve"):
            document[name] *= scale
        document["load_units"] *= scale**2
        document["linear_cost"] = self.costs.linear_cost
        return document | {"device": self.device.name, "devices": self.timer.num_devices, "scale": scale}


_SCALED_FLAGS = (
    "device_tokens",
    "host_tokens",
    "swap_tokens",
    "prefetch_tokens",
    "max_moving_tokens",
    "page_size",
    "max_step_tokens",
    "max_context",
)


def make_setting(args: argparse.Namespace) -> Setting:
    """Returns what `args` describe, in tokens of the simulation.

    Raises:
        InputError: a value is wrong; the message says which.
    """
    with bad_input():
        scale = engine_options.read_options(args, None).scale
        device = profile_named(args.device)
        if args.model not in PRESETS:
            raise ValueError(f"unknown model {args.model!r}; known: {', '.join(PRESETS)}.")
        model = PRESETS[args.model]
        costs = model_costs(model, args.model)
        data, tensor = engine_options.mesh_shape(args)
        timer = StepTimer(costs, device, num_devices=data * tensor, scale=scale)
        scaled = argparse.Namespace(**vars(args))
        scaled.load_units = "0" if args.load_units == "auto" else args.load_units
        engine_options.check_flags(scaled)
        scaled.max_context = MAX_CONTEXT if args.max_context is None else args.max_context
        if args.max_step_tokens is None:
            most = min(engine_options.MAX_STEP_TOKENS, scaled.max_context)
            scaled.max_step_tokens = engine_options.whole_pages(most, args.page_size)
        for name in _SCALED_FLAGS:
            value = getattr(scaled, name)
            if value is not None:
                if value % scale:
                    raise ValueError(f"{name}={value} must be a multiple of scale={scale}.")
                setattr(scaled, name, value // scale)
        if args.load_units == "auto":
            scaled.load_units = timer.load_units(scaled.page_size) if args.host_tokens else 0.0
        else:
            scaled.load_units = engine_options.load_units(args) / scale**2
    return Setting(
        args=scaled,
        model=SimulatedModel(name=args.model, config=model),
        costs=costs,
        device=device,
        timer=timer,
        max_context=scaled.max_context,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    engine_flags.add_trace_flags(parser)
    group = parser.add_argument_group("model, device and engine")
    group.add_argument("--model", required=True, metavar="M", help=", ".join(PRESETS))
    group.add_argument("--device", default="h100", metavar="NAME", help=f"{', '.join(PROFILES)} (h100)")
    group.add_argument(
        "--mesh", default="1x1", metavar="DATAxTENSOR", help="devices that share all work evenly, at no cost (1x1)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of --sample")
    engine_flags.add_cache_flags(group)
    group.add_argument(
        "--load-units",
        default="auto",
        metavar="auto|N",
        help="units that loading a host page costs; a page that is cheaper to compute is computed; auto: by the device",
    )
    parser.add_argument("--policy", default="penelope", metavar="NAME,...", help="one or several, compared in a table")
    parser.add_argument("--sample", type=int, metavar="N", help="play N sessions of the traces, drawn by --seed")
    parser.add_argument(
        "--samples", type=int, default=1, metavar="R", help="repeat with R draws, by --seed and the seeds after it (1)"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="do not plan a step while the device runs the one before"
    )
    parser.add_argument("--every-step", action="store_true", help="plan each decode step: slower, the same result")
    parser.add_argument("--json", metavar="FILE", help="write the summary here, and one line a request beside it")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    policies = engine_options.policies(args, args.policy)
    engine_options.check_output("--json", args.json)
    setting = make_setting(args)
    if args.samples < 1 or (args.samples > 1 and args.sample is None):
        raise InputError(f"--samples {args.samples}: must be at least 1, and more than 1 needs --sample.")
    trace = engine_options.load_trace(setting.args, setting.max_context)
    seeds = range(args.seed, args.seed + args.samples)
    with bad_input():
        drawn = [
            trace.sessions if args.sample is None else sample_sessions(trace.sessions, args.sample, seed)
            for seed in seeds
        ]
    configs = [[setting.engine_config(sessions, policy) for policy in policies] for sessions in drawn]
    print(simulation_tables.heading(setting.device, setting.costs, drawn, configs[0][0], setting.timer))
    several = len(drawn) * len(policies) > 1
    documents: list[dict[str, Any]] = []
    for seed, sessions, sample_configs in zip(seeds, drawn, configs, strict=True):
        for config in sample_configs:
            name = config.policy.name if args.samples == 1 else f"{config.policy.name}.{seed}"
            per_request = _records_file(args.json, name if several else None)
            document, simulation = simulated(
                setting, trace, sessions, config, args.sessions, seed=seed, label=name, per_request=per_request
            )
            documents.append(document)
            if per_request is not None:
                write_records(per_request, simulation.records)
            if simulation.partial:
                break
        if documents[-1]["run"]["partial"]:
            print("Interrupted: what was simulated so far follows.")
            break
    print(simulation_tables.comparison(documents))
    if args.json:
        write_json(args.json, documents if several else documents[0])
    return INTERRUPTED if documents[-1]["run"]["partial"] else 0


def simulated(
    setting: Setting,
    trace: Trace,
    sessions: Sequence[Session],
    config: EngineConfig,
    num_live: int,
    *,
    seed: int,
    label: str,
    per_request: str | None = None,
    interruptible: bool = True,
) -> tuple[dict[str, Any], Simulation]:
    """Runs one simulation.

    Args:
        setting: what is simulated.
        trace: what was read.
        sessions: of the trace, those to be played, drawn by `seed`.
        config: of the engine.
        num_live: sessions alive at once.
        label: of the progress bar.
        per_request: where the caller writes the records.
        interruptible: whether Ctrl-C and SIGTERM end it early, with what there is so far; else they are not handled.

    Returns:
        Its JSON document, and the simulation.
    """
    args = setting.args
    overlap = not args.no_overlap
    simulation = run_simulation(
        config,
        setting.timer,
        sessions,
        num_live,
        label=label,
        overlap=overlap,
        count_runs=not args.every_step,
        interruptible=interruptible,
    )
    options = dataclasses.asdict(engine_options.read_options(args, setting.max_context * setting.timer.scale))
    options["max_delay_s"] = None if options["max_delay_s"] == float("inf") else options["max_delay_s"]
    settings = {
        **options,
        **setting.document(config, num_live),
        "overlap": overlap,
        "trace": [str(path) for path in args.trace],
        "sample": args.sample,
    }
    run = {
        "seed": seed,
        **simulated_environment(setting),
        "trace_sha256": trace.sha256,
        "skipped_entries": len(trace.problems),
    }
    return summary(simulation, sessions, settings, run, per_request), simulation


def simulated_environment(setting: Setting) -> dict[str, Any]:
    """Returns commit, jax version (installed, not used) and device, with all numbers of the cost model."""
    return {
        "commit": engine_options.commit(),
        "jax": importlib.metadata.version("jax"),
        "device": f"{setting.timer.num_devices} x {setting.device.name}, simulated",
        "device_profile": dataclasses.asdict(setting.device),
        "model_costs": dataclasses.asdict(setting.costs),
    }


def _records_file(json_file: str | None, name: str | None) -> str | None:
    if json_file is None:
        return None
    path = pathlib.Path(json_file)
    middle = f".{name}" if name else ""
    return str(path.with_name(f"{path.name.removesuffix('.json')}{middle}.requests.jsonl"))
