"""Every sampling option through the whole engine: against a dense forward pass in numpy, and whatever else happens."""

import dataclasses

import numpy as np
import pytest
from step_world import dense_logits
from test_sampling_slots import penalised

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver
from penelope_jax.events import Finished, Sampled
from penelope_jax.executor import JaxExecutor
from penelope_jax.models.registry import load_model
from penelope_jax.segments import SamplingParams

PAGE, CONTEXT = 8, 128
OPTIONS = {
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.4),
    "bias": SamplingParams(logit_bias=((17, 4.0), (201, -6.0))),
    "all": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.5, logit_bias=((3, 2.0),), min_tokens=20
    ),
}


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny")


@pytest.fixture(scope="module")
def executor(model) -> JaxExecutor:
    executor = JaxExecutor(
        model.config,
        model.params,
        num_pages=80,
        page_size=PAGE,
        max_context=CONTEXT,
        max_segments=6,
        max_step_tokens=64,
        token_buckets=(64,),
        deterministic=True,
    )
    executor.warm_up()
    return executor


def driver_of(executor: JaxExecutor, *, num_pages: int = 80, overlap: bool = False, **changes) -> Driver:
    config = EngineConfig(
        device_tokens=num_pages * PAGE,
        page_size=PAGE,
        max_context=CONTEXT,
        max_running=6,
        max_step_tokens=64,
        max_step_segments=6,
        output_reserve=1,
        vocab_size=256,
    )
    return Driver(dataclasses.replace(config, **changes), executor, overlap=overlap)


def prompts(number: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, int(random.integers(9, 40))) for _ in range(number)]


def run_to_idle(driver: Driver) -> tuple[dict[int, list[Sampled]], dict[int, Finished]]:
    samples: dict[int, list[Sampled]] = {}
    ends = {}
    while not driver.idle:
        for update in driver.step():
            if isinstance(update, Sampled):
                samples.setdefault(update.request_id, []).append(update)
            elif isinstance(update, Finished):
                ends[update.request_id] = update
    return samples, ends


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_outputs_against_numpy(model, executor, overlap):
    """All options at once in one batch; log-probabilities are of the logits as the model gave them."""
    driver = driver_of(executor, overlap=overlap)
    number = 30
    cases = {}
    for prompt, sampling in zip(prompts(len(OPTIONS)), OPTIONS.values()):
        sampling = dataclasses.replace(sampling, max_tokens=number, top_logprobs=len(cases) * 5)
        if sampling.min_tokens:
            sampling = dataclasses.replace(sampling, stop_token_ids=tuple(range(100, 140)))
        cases[driver.submit(prompt, sampling)] = (prompt, sampling)
    samples, ends = run_to_idle(driver)
    changed = 0
    for request_id, (prompt, sampling) in cases.items():
        tokens = [sample.token for sample in samples[request_id]]
        whole = np.concatenate([prompt, tokens]).astype(np.int32)
        logits = np.asarray(dense_logits(model.config, model.params, np.resize(whole, CONTEXT)), np.float64)
        for place, sample in enumerate(samples[request_id]):
            known = whole[: len(prompt) + place].tolist()
            row = logits[len(known) - 1]
            wanted = penalised(row, known, len(prompt), sampling)
            assert wanted.max() - wanted[sample.token] < 1e-4, (sampling, place)
            changed += sample.token != row.argmax()
            np.testing.assert_allclose(sample.logprob, log_softmax(row)[sample.token], atol=1e-4)
            assert len(sample.top) == sampling.top_logprobs
            if sample.top:
                best, values = zip(*sample.top)
                np.testing.assert_allclose(values, log_softmax(row)[list(best)], atol=1e-4)
                np.testing.assert_allclose(values, np.sort(log_softmax(row))[::-1][: len(best)], atol=1e-4)
                assert sample.token not in best or values[best.index(sample.token)] == sample.logprob
        if ends[request_id].reason == "stop":
            assert len(tokens) > sampling.min_tokens and tokens[-1] in sampling.end_token_ids
        else:
            assert len(tokens) == number
    assert changed > 30, "the options change too little to be a test"


def mixed_requests() -> list[tuple[np.ndarray, SamplingParams]]:
    """Greedy and drawn requests, with and without options."""
    requests = []
    for index, prompt in enumerate(prompts(8, seed=1)):
        sampling = [SamplingParams(), SamplingParams(min_p=0.05), *OPTIONS.values()][index % 7]
        changes = {"max_tokens": 40, "temperature": index % 2 * 1.2, "seed": index, "stop_token_ids": (5, 6, 7)}
        requests.append((prompt, dataclasses.replace(sampling, top_logprobs=index % 3, **changes)))
    return requests


@pytest.fixture(scope="module")
def alone(executor) -> list[list[tuple]]:
    """What each of the mixed requests gives with nothing beside it."""
    outputs = []
    for prompt, sampling in mixed_requests():
        driver = driver_of(executor)
        request_id = driver.submit(prompt, sampling)
        samples, _ = run_to_idle(driver)
        outputs.append([(sample.token, sample.logprob, sample.top) for sample in samples[request_id]])
    return outputs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [80, 20])
def test_neighbours_overlap_and_retraction_change_nothing(executor, alone, overlap, num_pages):
    """Bit by bit. In the small pool requests are sent back, and their earlier outputs still count as outputs."""
    before = executor.num_compilations
    driver = driver_of(executor, num_pages=num_pages, overlap=overlap)
    ids = [driver.submit(prompt, sampling) for prompt, sampling in mixed_requests()]
    samples, ends = run_to_idle(driver)
    found = [[(sample.token, sample.logprob, sample.top) for sample in samples[request_id]] for request_id in ids]
    assert found == alone
    retracted = [request_id for request_id in ids if ends[request_id].num_retractions]
    assert len(retracted) >= 3 if num_pages == 20 else not retracted
    samplings = [sampling for _, sampling in mixed_requests()]
    counted = [index for index in retracted if samplings[ids.index(index)].needs_slot]
    assert counted or num_pages > 20, "no request whose outputs are counted was sent back"
    assert executor.num_compilations == before


def test_more_requests_with_slots_than_there_are_slots(executor):
    """They wait for one; the others do not."""
    sampling = SamplingParams(presence_penalty=1.0, max_tokens=6)
    driver = driver_of(executor, max_running=20)
    expected = [driver.generate(prompt, sampling).tokens for prompt in prompts(9, seed=2)]
    ids = [driver.submit(prompt, sampling) for prompt in prompts(9, seed=2)]
    plain = driver.submit(prompts(1, seed=3)[0], SamplingParams(max_tokens=3))
    most = 0
    samples: dict[int, list[int]] = {}
    while not driver.idle:
        for update in driver.step():
            if isinstance(update, Sampled):
                samples.setdefault(update.request_id, []).append(update.token)
        slots = [request.slot for request in driver.state.running if request.slot >= 0]
        assert len(set(slots)) == len(slots) and max(slots, default=0) < 6
        most = max(most, len(slots))
    assert most == 6
    assert [samples[request_id] for request_id in ids] == expected
    assert len(samples[plain]) == 3


def test_ending_tokens_are_masked_until_min_tokens(executor):
    prompt = prompts(1, seed=4)[0]
    free = driver_of(executor).generate(prompt, SamplingParams(max_tokens=30))
    token = free.tokens[3]
    first = free.tokens.index(token) + 1
    sampling = SamplingParams(max_tokens=30, eos_token_ids=(token,))
    result = driver_of(executor).generate(prompt, sampling)
    assert (result.tokens, result.reason) == (free.tokens[:first], "stop")
    ignored = driver_of(executor).generate(prompt, dataclasses.replace(sampling, ignore_eos=True))
    assert (ignored.tokens, ignored.reason) == (free.tokens, "length")
    both = dataclasses.replace(sampling, ignore_eos=True, stop_token_ids=(token,))
    assert driver_of(executor).generate(prompt, both).tokens == free.tokens[:first]
    for least in (first - 1, first, 12):
        masked = driver_of(executor).generate(prompt, dataclasses.replace(sampling, min_tokens=least))
        assert token not in masked.tokens[:least] and len(masked.tokens) > least
        if least < first:
            assert masked.tokens == result.tokens
        else:
            assert masked.tokens[: first - 1] == free.tokens[: first - 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_share_the_prompt_and_differ_by_their_key(executor, overlap):
    prompt = np.random.default_rng(5).integers(0, 256, 50)
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=8)
    driver = driver_of(executor, overlap=overlap)
    ids = driver.submit_many(prompt, sampling, 4)
    samples, ends = run_to_idle(driver)
    outputs = [tuple(sample.token for sample in samples[request_id]) for request_id in ids]
    assert len(set(outputs)) == 4
    hits = []
    for request_id in ids:
        metrics = ends[request_id].metrics
        assert metrics is not None
        hits.append(metrics.device_hit)
    assert hits == [0, 48, 48, 48]
    for choice, output in enumerate(outputs):
        alone = driver_of(executor).generate(prompt, dataclasses.replace(sampling, choice=choice))
        assert tuple(alone.tokens) == output
    for bad, message in (
        ({"number": 0}, "number=0 of choices must be at least 1."),
        ({"number": 2, "watches": []}, "0 watches for number=2 choices; there must be one for each."),
    ):
        with pytest.raises(ValueError) as caught:
            driver.submit_many(prompt, sampling, **bad)
        assert str(caught.value) == message
    assert driver.idle
