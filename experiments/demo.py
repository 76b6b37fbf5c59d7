"""`make demo`: what this engine does, on a laptop, in under five minutes.

First a real language model goes on with a conversation whose front was evicted. Then four synthetic agent sessions of
16K to 32K tokens run on a small random model, under the policies of SGLang and vLLM and under Penelope's, in a cache
that cannot hold them all.
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

from penelope_jax.config import policy_named
from penelope_jax.experiments import command, demo_conversation, engine_flags, engine_options, replay
from penelope_jax.experiments.sessions import Session, cut_session
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.metrics import write_json

FAILED = 1  # exit code
POLICIES = ("sglang", "vllm", "penelope")
PAGE_SIZE = 64
MAX_REPLY = 12  # tokens; decoding is not what the demonstration shows
MAX_DELAY_S = 1.0


def demo_sessions(num_turns: int, seed: int) -> tuple[Session, ...]:
    """Returns four agent sessions that share 15,000 tokens and grow to at most 32K, with short replies and delays."""
    options = SynthesisOptions(sessions=4, turns=num_turns, context=32_768, divergence_rate=0.0, seed=seed)
    return tuple(_with_short_replies(cut_session(s, max_delay_s=MAX_DELAY_S)) for s in synthesize(options))


def _with_short_replies(session: Session) -> Session:
    turns = []
    for turn in session.turns:
        keep = turns[-1].history_len if turns else 0
        turns.append(dataclasses.replace(turn, keep=keep, output_len=min(turn.output_len, MAX_REPLY)))
    return dataclasses.replace(session, turns=tuple(turns))


def compare_policies(args: argparse.Namespace) -> bool:
    """Replays the sessions under each policy; returns whether Penelope recomputed least and all outputs are equal."""
    from penelope_jax.models import registry

    model = registry.load_model("random:b", seed=args.seed)
    sessions = demo_sessions(args.turns, args.seed)
    settings = argparse.Namespace(
        page_size=PAGE_SIZE,
        sessions=len(sessions),
        device_tokens=None,
        host_tokens=0,
        swap_tokens=engine_flags.SWAP_TOKENS,
        prefetch_tokens=engine_flags.PREFETCH_TOKENS,
        max_moving_tokens=0,
        load_units="0",
        scheduler="lpm",
        max_wait_s=60.0,
        max_step_tokens=None,
    )
    configs = [engine_options.engine_config(settings, model, sessions, policy_named(name), 32_768) for name in POLICIES]
    longest, needed = engine_options.working_set(sessions, len(sessions))
    prompts = [turn.prompt_len for session in sessions for turn in session.turns]
    print(
        f"  {len(sessions)} sessions, {len(prompts)} requests of {min(prompts):,} to {max(prompts):,} tokens; all need "
        f"{needed:,} tokens, the cache holds {configs[0].device_tokens:,} (longest request {longest:,}).",
        flush=True,
    )
    executor = engine_options.make_executor(model, configs[0], deterministic=True)
    start_s = time.perf_counter()
    num_programs = engine_options.warm_up(executor)
    print(f"  {num_programs} programs compiled in {time.perf_counter() - start_s:.0f} s.", flush=True)
    environment = engine_options.environment()
    documents = []
    for config in configs:
        compiled = executor.num_compilations
        result = replay.run_replay(config, executor, sessions, len(sessions), label=config.policy.name)
        run: dict[str, Any] = {
            "seed": args.seed,
            **environment,
            "compiled_in_run": executor.num_compilations - compiled,
        }
        document = engine_options.config_document(config, model=model.name, deterministic=True)
        documents.append(replay.summary(result, sessions, document, run, None))
        print(f"  {config.policy.name}: {result.wall_s:.0f} s", flush=True)
        if result.partial:
            break
    print(replay.table(documents))
    if args.json:
        write_json(args.json, documents)
    if documents[-1]["run"]["partial"]:
        return False
    units = {document["config"]["policy"]: document["recompute_units"] for document in documents}
    same = len({document["run"]["fingerprint"] for document in documents}) == 1
    print(f"  Outputs identical under all policies: {'yes' if same else 'NO'}.")
    for other in ("sglang", "vllm"):
        print(f"  Recomputed units: penelope {1 - units['penelope'] / units[other]:.0%} below {other}.")
    print("  TTFT: time to the first token; JCT: time of a session; both vary with what else this machine does.")
    print(
        "  A unit is a query-key pair in every head of a layer: a token at position p costs c + p. Outputs are hashes."
    )
    return same and units["penelope"] < units["sglang"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("--part", choices=("all", "conversation", "policies"), default="all", help="what to show (all)")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="requests of each session (7)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sessions and the random weights")
    parser.add_argument("--json", metavar="FILE", help="write the comparison here")


def run(args: argparse.Namespace) -> int:
    """Runs the demonstration; returns 1 when it did not show what it should."""
    engine_options.check_output("--json", args.json)
    start_s = time.perf_counter()
    good = True
    if args.part in ("all", "conversation"):
        from penelope_jax.models import registry

        print("1. A conversation with SmolLM2-135M-Instruct goes on over a refilled hole.", flush=True)
        with engine_options.bad_input():
            model = registry.load_model("smollm2", dtype="float32")
        good = demo_conversation.run(model)
        print(flush=True)
    if args.part in ("all", "policies"):
        print("2. Agent sessions on a small random Qwen3, in a cache that is too small for all.", flush=True)
        good = compare_policies(args) and good
        print(flush=True)
    print("With a real model and recorded sessions (a folder of Hugging Face files, or a .gguf file):")
    print("  penelope replay TRACE... --model DIR --device-tokens 262144 --policy sglang,vllm,penelope --json out.json")
    print(f"{'Done' if good else 'FAILED'} in {time.perf_counter() - start_s:.0f} s.")
    if not good:
        print("demo: error: it did not show what it should; see above.", file=sys.stderr)
    return 0 if good else FAILED


if __name__ == "__main__":
    command.start_module("demo", "Show the engine at work.", add_flags, run)
