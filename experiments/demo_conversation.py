"""The first half of the demonstration: a conversation with a real model that goes on over a refilled hole.

Two conversations share a system prompt. While the second one is served, the cache is too small for both, so pages in
front of the first one's private history are evicted; its end stays. When the first conversation goes on, the hole is
recomputed in the same batch as its new tokens. Beside it the same is done in a cache that holds everything, and the
replies are compared token by token.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, GenerateResult
from penelope_jax.experiments import engine_options
from penelope_jax.segments import SamplingParams

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models.registry import LoadedModel

PAGE_SIZE = 16
REPLY_TOKENS = 28
OTHER_REPLY_TOKENS = 4
EVICTED_SHARE = 0.5  # of the first conversation's private pages, to size the small cache
MAX_CONTEXT = 1024

SYSTEM = "You are a helpful assistant. Answer in one short sentence."
FIRST = (
    "Text: Our service is called Harbour. It stores measurements of tide gauges along the coast. Every gauge sends one "
    "reading a minute, and a reading has a time, a height in centimetres and a battery level. The nightly report counts "
    "gauges whose battery is below twenty percent. Last night the report listed three gauges: Kelp Point, Old Pier and "
    "Seal Rock. The technician can visit one gauge a day and goes by boat.\n\nQuestion: What is the name of the service?"
)
SECOND = "Which three gauges were listed last night?"
OTHER = (
    "I am writing a letter to my landlord. The kitchen tap has been dripping for two weeks, the heating makes a knocking "
    "noise at night, and the window in the hall does not close. I called twice and nobody came. I would like a visit "
    "before the end of the month, on a weekday after five, and I would like to know who pays for the water that was "
    "lost. I want to stay friendly, since the flat is good and the neighbours are kind, but I also want an answer in "
    "writing. Please suggest an opening sentence for this letter."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the first conversation's second turn gave.

    Attributes:
        first, second: its two replies, as text. first_len: tokens of the first.
        result: of the second turn.
        evicted_pages: before and in it.
    """

    first: str
    first_len: int
    second: str
    result: GenerateResult
    evicted_pages: int


def run(model: "LoadedModel") -> bool:
    """Runs both caches and prints what happened; returns whether a hole was refilled and the replies are the same."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "a real model has a tokenizer"
    system = {"role": "system", "content": SYSTEM}
    opening = [system, {"role": "user", "content": FIRST}]
    other = [system, {"role": "user", "content": OTHER}]

    def encode(messages: list[dict[str, str]]) -> np.ndarray:
        return tokenizer.encode_chat(messages, add_generation_prompt=True)

    large = MAX_CONTEXT // PAGE_SIZE
    config = EngineConfig(
        device_tokens=large * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_context=MAX_CONTEXT,
        max_running=1,
        max_step_tokens=512,
        max_step_segments=8,
        output_reserve=REPLY_TOKENS,
        linear_cost=model.config.linear_cost,
        vocab_size=model.config.vocab_size,
    )
    executor = engine_options.make_executor(model, config, deterministic=True)
    engine_options.warm_up(executor)
    print(f"  ... a cache of {config.device_tokens} tokens ...", flush=True)
    without = _converse(model, config, executor, encode, opening, other)

    # Room for both conversations, less some pages of the first one's private history; and for its second turn.
    first_pages = (len(encode(opening)) + without.first_len - 1) // PAGE_SIZE
    other_pages = -(-(len(encode(other)) + OTHER_REPLY_TOKENS) // PAGE_SIZE)
    shared_pages = len(tokenizer.encode_chat([system])) // PAGE_SIZE
    dropped = round((first_pages - shared_pages) * EVICTED_SHARE)
    metrics = without.result.metrics
    assert metrics is not None, "the request ran"
    second_pages = -(-(metrics.prompt_len + REPLY_TOKENS) // PAGE_SIZE) + 1
    small = max(first_pages - dropped + other_pages - shared_pages, second_pages)
    small_config = dataclasses.replace(config, device_tokens=small * PAGE_SIZE)
    print(f"  ... a cache of {small_config.device_tokens} tokens ...", flush=True)
    over_hole = _converse(model, small_config, executor, encode, opening, other)

    _print(without, over_hole, large, small)
    metrics = over_hole.result.metrics
    assert metrics is not None, "the request ran"
    same = without.first == over_hole.first and without.result.tokens == over_hole.result.tokens
    return same and metrics.refilled > 0


def _converse(model, config: EngineConfig, executor: "JaxExecutor", encode, opening, other) -> Outcome:
    driver = Driver(config, executor)

    def say(messages: list[dict[str, str]], max_tokens: int = REPLY_TOKENS) -> tuple[str, GenerateResult]:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=model.eos_token_ids)
        result = driver.generate(encode(messages), sampling)
        return model.tokenizer.decode(result.tokens).strip(), result

    first, opened = say(opening)
    say(other, OTHER_REPLY_TOKENS)
    second, result = say([*opening, {"role": "assistant", "content": first}, {"role": "user", "content": SECOND}])
    return Outcome(
        first=first,
        first_len=len(opened.tokens),
        second=second,
        result=result,
        evicted_pages=driver.state.counters.evicted_pages,
    )


def _print(without: Outcome, over_hole: Outcome, large: int, small: int) -> None:
    metrics = over_hole.result.metrics
    whole = without.result.metrics
    assert metrics is not None and whole is not None, "the requests ran"
    match_stop = metrics.prompt_len - metrics.new
    holes = [(start, min(stop, match_stop)) for start, stop in metrics.compute_spans if start < match_stop]
    spans = ", ".join(f"[{start}, {stop})" for start, stop in holes) or "none"
    print(f"  user       {' '.join(FIRST.split())}")
    print(f"  assistant  {over_hole.first}")
    print("  ... another conversation is served, which needs room in the small cache ...")
    print(f"  user       {SECOND}")
    print(f"  assistant  {without.second}")
    print(f"             ^ cache of {large * PAGE_SIZE} tokens: {whole.device_hit} of {whole.prompt_len} reused")
    print(f"  assistant  {over_hole.second}")
    print(
        f"             ^ cache of {small * PAGE_SIZE} tokens, {over_hole.evicted_pages} pages evicted: "
        f"{metrics.device_hit} of {metrics.prompt_len} reused; hole {spans} refilled: {metrics.refilled} tokens"
    )
    same = without.result.tokens == over_hole.result.tokens
    bits = np.array_equal(without.result.logprobs, over_hole.result.logprobs)
    print(f"  Same text: {'yes' if same else 'NO'}. Same log-probabilities, bit by bit: {'yes' if bits else 'NO'}.")
