"""The flags that commands share; `engine_options.py` says what they make."""

import argparse
import math

from penelope_jax import config as config_lib
from penelope_jax.experiments.traces import SUBAGENTS

SWAP_TOKENS = 1024  # the paper's
PREFETCH_TOKENS = 1024


def add_trace_flags(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """Adds TRACE... and the flags that say how traces are read."""
    parser.add_argument(
        "trace", nargs=nargs, metavar="TRACE", help="file or folder: .jsonl (ours), .json (Weka); or .gz"
    )
    group = parser.add_argument_group("traces")
    group.add_argument(
        "--scale", type=int, default=1, metavar="K", help="divide token counts by K, a power of two <= 64"
    )
    group.add_argument(
        "--shared-prefix",
        type=int,
        metavar="N",
        help="Weka files: the first N trace tokens are the same in all sessions",
    )
    group.add_argument("--max-turns", type=int, metavar="N", help="end each session after N turns")
    group.add_argument("--max-delay-s", type=float, default=math.inf, metavar="S", help="cut longer delays to S")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="multiply delays by X")
    group.add_argument(
        "--subagents", default="skip", metavar="|".join(SUBAGENTS), help="Weka subagents: skip, or separate sessions"
    )
    group.add_argument("--skip-bad", action="store_true", help="leave out broken entries, and say how many")


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = None,
    page_size: int = 64,
    sessions: int = 4,
    load_units: str = "auto",
) -> None:
    """Adds the flags of model, cache and engine. `--model` is required unless `model` gives a default."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model",
        required=model is None,
        default=model,
        metavar="M",
        help="Hugging Face directory, .gguf file, smollm2, or random:NAME",
    )
    group.add_argument("--dtype", metavar="float32|bfloat16", help="of weights and K/V; default: what the model says")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights")
    group.add_argument(
        "--mesh", default="1x1", metavar="DATAxTENSOR", help="devices; on CPU that many are simulated (1x1)"
    )
    add_cache_flags(group, page_size=page_size, sessions=sessions)
    group.add_argument(
        "--load-units",
        default=load_units,
        metavar="auto|N",
        help="units that loading a host page costs; a page that is cheaper to compute is computed; 0: all are loaded; "
        f"auto: measured at the start ({load_units})",
    )


def add_cache_flags(group: "argparse._ArgumentGroup", *, page_size: int = 64, sessions: int = 4) -> None:
    """Adds the flags of cache and scheduling, which `replay` and `simulate` share."""
    group.add_argument(
        "--device-tokens",
        type=int,
        metavar="N",
        help="device pool; default: max(1.5 x the longest request, 45 %% of what the live sessions need in the end)",
    )
    group.add_argument("--host-tokens", type=int, default=0, metavar="N", help="host pool; 0: none")
    group.add_argument(
        "--swap-tokens", type=int, default=SWAP_TOKENS, metavar="N", help="host buffer for swaps with both tiers full"
    )
    group.add_argument(
        "--prefetch-tokens", type=int, default=PREFETCH_TOKENS, metavar="N", help="most loaded ahead for the queue"
    )
    group.add_argument(
        "--max-moving-tokens",
        type=int,
        default=0,
        metavar="N",
        help="most tokens moving between the tiers at once; 0: a step's and the swap buffer's",
    )
    group.add_argument(
        "--page-size", type=int, default=page_size, metavar="N", help=f"tokens a page, a power of two ({page_size})"
    )
    group.add_argument(
        "--sessions", type=int, default=sessions, metavar="N", help=f"sessions live at once ({sessions})"
    )
    group.add_argument("--scheduler", default="lpm", metavar="|".join(config_lib.SCHEDULERS), help="who runs next")
    group.add_argument(
        "--max-wait-s", type=float, default=60.0, metavar="S", help="lpm-cost: who waited longer is first"
    )
    group.add_argument(
        "--max-context", type=int, metavar="N", help="longest prompt and reply; a session ends before it"
    )
    group.add_argument("--max-step-tokens", type=int, metavar="N", help="token budget of a step (the prefill chunk)")
    group.add_argument("--insert-unit", metavar="chunk|prompt", help="what makes a tree node, for the baselines")
