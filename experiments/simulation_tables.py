"""What a simulation prints: what is simulated, and policies compared, as means over samples."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from penelope_jax.config import EngineConfig
from penelope_jax.device_profiles import DeviceProfile
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.text_table import text_table
from penelope_jax.step_time import ModelCosts, StepTimer

Documents = Sequence[dict[str, Any]]


def heading(
    device: DeviceProfile,
    model: ModelCosts,
    samples: Sequence[Sequence[Session]],
    config: EngineConfig,
    timer: StepTimer,
) -> str:
    """Returns what is simulated, in a few lines."""
    num_requests = [sum(len(session.turns) for session in sessions) for sessions in samples]
    drawn = f"{len(samples)} samples of " if len(samples) > 1 else ""
    requests = f"{min(num_requests):,}" + (f" to {max(num_requests):,}" if len(samples) > 1 else "")
    host = f" + host {config.host_tokens * timer.scale:,}" if config.host_tokens else ""
    coarser = f"; {timer.scale} tokens are simulated as one" if timer.scale > 1 else ""
    return (
        f"{drawn}{len(samples[0])} sessions, {requests} requests; {model.name} on {timer.num_devices} x {device.name}; "
        f"device pool {config.device_tokens * timer.scale:,}{host} tokens{coarser}.\n"
        f"Assumed: {device.compute_share:.0%} of {device.peak_flops / 1e12:.0f} TFLOP/s, {device.memory_share:.0%} of "
        f"{device.memory_bandwidth / 1e12:.2f} TB/s, link {device.link_share:.0%} of "
        f"{device.link_bandwidth / 1e9:.0f} GB/s each way."
    )


def mean(documents: Documents, value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """Returns the mean of a figure over documents that have it."""
    found = [figure for document in documents if (figure := value(document)) is not None]
    return sum(found) / len(found) if found else None


def changes(documents: Documents, baseline: Documents, value: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """Returns, sample by sample, a figure's relative change against the baseline's, in the order of the samples."""
    found = []
    for document, other in zip(documents, baseline):
        figure, base = value(document), value(other)
        if figure is not None and base:
            found.append(figure / base - 1)
    return found


def ttft(document: dict[str, Any]) -> float | None:
    """The mean time to first token."""
    return document["ttft_s"]["mean"]


def jct(document: dict[str, Any]) -> float | None:
    """The mean time of a session."""
    return document["jct_s"]["mean"]


def by_policy(documents: Documents) -> dict[str, list[dict[str, Any]]]:
    """Returns the documents of each policy, in order of appearance, those of one policy in the order of samples."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        found.setdefault(document["config"]["policy"], []).append(document)
    return found


def comparison(documents: Documents) -> str:
    """Returns policies compared, one line each; changes are against the first.

    Over several samples figures are means, and changes the mean of the samples' changes with its standard error and
    their range.
    """
    policies = by_policy(documents)
    baseline = next(iter(policies.values()))
    head = ["policy", "requests", "TTFT mean s", "p50", "p90", "change", "JCT mean s", "change", "hit rate"]
    head += ["recomputed tokens", "units", "evicted pages", "moved", "swapped loads", "simulated s", "per wall s"]
    rows = [head]
    for name, found in policies.items():
        partial = any(document["run"]["partial"] for document in found)
        speed = sum(d["run"]["simulated_s"] for d in found) / max(1e-9, sum(d["run"]["wall_s"] for d in found))
        rows.append(
            [
                name + (" (partial)" if partial else ""),
                f"{sum(document['requests'] for document in found):,}",
                _number(mean(found, ttft), ".3f"),
                _number(mean(found, lambda d: d["ttft_s"]["p50"]), ".3f"),
                _number(mean(found, lambda d: d["ttft_s"]["p90"]), ".3f"),
                "" if found is baseline or partial else changes_text(changes(found, baseline, ttft)),
                _number(mean(found, jct), ",.1f"),
                "" if found is baseline or partial else changes_text(changes(found, baseline, jct)),
                _number(mean(found, lambda d: d["hit_rate"]), ".1%"),
                _number(mean(found, lambda d: d["run"]["recomputed_tokens"]), ",.0f"),
                _number(mean(found, lambda d: d["recompute_units"]), ".3e"),
                _number(mean(found, lambda d: d["evicted_pages"]), ",.0f"),
                _number(mean(found, lambda d: d["moved_pages"]), ",.0f"),
                _number(mean(found, lambda d: d["swapped_loads"]), ",.0f"),
                _number(mean(found, lambda d: d["run"]["simulated_s"]), ",.0f"),
                f"{speed:,.0f}",
            ]
        )
    return text_table(rows, ["<", *[">"] * (len(head) - 1)])


def changes_text(found: Sequence[float]) -> str:
    """Returns the mean of relative changes in percent, and of several its standard error and their range.

    Single samples differ by much more than a change of policy may: a closed loop amplifies small shifts.
    """
    if not found:
        return "-"
    text = f"{sum(found) / len(found):+.1%}"
    if len(found) == 1:
        return text
    error = statistics.stdev(found) / math.sqrt(len(found))
    return f"{text} ±{error * 100:.1f} ({min(found):+.0%} to {max(found):+.0%})"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
