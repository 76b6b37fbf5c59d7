"""Configurations are values, checked at birth, with texts that name the value and the limit."""

import dataclasses

import pytest

from penelope_jax.config import POLICIES, SCHEDULERS, EngineConfig, Start, Unit, policy_named
from penelope_jax.segments import SamplingParams


def test_the_policies_are_what_their_names_say():
    assert {name: (policy.start, policy.unit) for name, policy in POLICIES.items()} == {
        "sglang": (Start.LEAF_TAIL, Unit.NODE),
        "sglang-reclaim": (Start.LEAF_TAIL, Unit.NODE),
        "sglang-device-lpm": (Start.LEAF_TAIL, Unit.NODE),
        "vllm": (Start.LEAF_TAIL, Unit.PAGE),
        "leaf-head": (Start.LEAF_HEAD, Unit.PAGE),
        "leaf-head-node": (Start.LEAF_HEAD, Unit.NODE),
        "front-node": (Start.PRIVATE_FRONT, Unit.NODE),
        "penelope": (Start.PRIVATE_FRONT, Unit.PAGE),
    }
    assert all(policy_named(name) is policy and policy.name == name for name, policy in POLICIES.items())
    assert [name for name, policy in POLICIES.items() if not policy.stamp_waiting] == ["vllm"]


def test_an_unknown_policy_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError) as caught:
        policy_named("lru")
    assert str(caught.value) == (
        "unknown policy 'lru'; known: sglang, sglang-reclaim, sglang-device-lpm, vllm, leaf-head, leaf-head-node, front-node, penelope."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be a power of two from 1 to 1024."),
        ({"page_size": 48}, "page_size=48 must be a power of two from 1 to 1024."),
        ({"page_size": 2048}, "page_size=2048 must be a power of two from 1 to 1024."),
        ({"page_size": -64}, "page_size=-64 must be a power of two from 1 to 1024."),
        ({"device_tokens": 0}, "device_tokens=0 must be at least 1."),
        ({"device_tokens": 100}, "device_tokens=100 must be a multiple of page_size=64."),
        ({"max_step_tokens": 100}, "max_step_tokens=100 must be a multiple of page_size=64."),
        ({"max_step_tokens": 0}, "max_step_tokens=0 must be at least 1."),
        ({"max_step_segments": 0}, "max_step_segments=0 must be at least 1."),
        ({"max_running": 0}, "max_running=0 must be at least 1."),
        ({"max_context": 0}, "max_context=0 must be at least 1."),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1."),
        ({"host_tokens": -64}, "host_tokens=-64 must not be negative."),
        ({"host_tokens": 100}, "host_tokens=100 must be a multiple of page_size=64."),
        ({"swap_tokens": -1}, "swap_tokens=-1 must not be negative."),
        ({"load_units": -0.5}, "load_units=-0.5 must not be negative."),
        (
            {"host_tokens": 64, "swap_tokens": 0},
            "swap_tokens=0 must be a multiple of page_size=64, and at least 1, with a host tier.",
        ),
        (
            {"host_tokens": 64, "swap_tokens": 96},
            "swap_tokens=96 must be a multiple of page_size=64, and at least 1, with a host tier.",
        ),
        (
            {"host_tokens": 64, "prefetch_tokens": 32},
            "prefetch_tokens=32 must be a multiple of page_size=64, and at least 0, with a host tier.",
        ),
        (
            {"host_tokens": 64, "max_moving_tokens": 64},
            (
                "max_moving_tokens=64 must be 0 or at least 2 pages of 64 tokens: with both tiers full a page is loaded while "
                "another one leaves."
            ),
        ),
        (
            {"host_tokens": 64, "max_moving_tokens": 8},
            "max_moving_tokens=8 must be a multiple of page_size=64, and at least 0, with a host tier.",
        ),
        ({"output_reserve": -1}, "output_reserve=-1 must not be negative."),
        ({"max_wait_s": -0.5}, "max_wait_s=-0.5 must not be negative."),
        ({"linear_cost": -1.0}, "linear_cost=-1.0 must not be negative."),
        ({"max_wait_s": float("nan")}, "max_wait_s=nan must not be negative."),
        *[
            (
                {"host_tokens": 64, name: 2**31},
                f"{name}=2147483648 are 33554432 pages of 64 tokens; at most 16777216 can be.",
            )
            for name in ("device_tokens", "host_tokens", "swap_tokens")
        ],
        ({"scheduler": "sjf"}, "unknown scheduler 'sjf'; known: lpm, lpm-cost, fcfs."),
    ],
)
def test_a_bad_engine_config_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(EngineConfig(device_tokens=640), **changes)
    assert str(caught.value) == message


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'swap_pages'"):
        EngineConfig(device_tokens=640, swap_pages=1)  # type: ignore[call-arg]


def test_equal_configs_are_one_value():
    assert hash(EngineConfig(device_tokens=640)) == hash(EngineConfig(device_tokens=640, scheduler=SCHEDULERS[0]))
    assert EngineConfig(device_tokens=640).num_device_pages == 10
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(device_tokens=640).page_size = 4  # type: ignore[misc]


def test_salt_and_weights_are_both_in_the_namespace():
    names = {
        EngineConfig(device_tokens=64, weights_fingerprint=weights).namespace(salt)
        for weights in ("", "w1", "w2")
        for salt in ("", "a", "b")
    }
    assert len(names) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0."),
        ({"temperature": float("inf")}, "temperature=inf must be finite and at least 0."),
        ({"temperature": float("nan")}, "temperature=nan must be finite and at least 0."),
        ({"top_p": 0.0}, "top_p=0.0 must be in (0, 1]."),
        ({"top_p": 1.5}, "top_p=1.5 must be in (0, 1]."),
        ({"top_k": -1}, "top_k=-1 must be at least 0 (0 keeps all)."),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1."),
        ({"seed": -1}, "seed=-1 must be in [0, 2**32)."),
        ({"seed": 2**32}, f"seed={2**32} must be in [0, 2**32)."),
        ({"choice": -1}, "choice=-1 must be at least 0."),
        ({"prompt_logprobs_from": -1}, "prompt_logprobs_from=-1 must be at least 0."),
        ({"min_p": -0.1}, "min_p=-0.1 must be in [0, 1]."),
        ({"min_p": float("nan")}, "min_p=nan must be in [0, 1]."),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be finite and above 0."),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf must be finite and above 0."),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be in [-2, 2]."),
        ({"frequency_penalty": -3}, "frequency_penalty=-3 must be in [-2, 2]."),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias: token id -1 must be at least 0."),
        ({"logit_bias": ((5, 101),)}, "logit_bias: 101 of token id 5 must be in [-100, 100]."),
        ({"logit_bias": ((5, 1), (6, 1), (5, 2))}, "logit_bias has 3 entries for 2 token ids; each id once."),
        ({"min_tokens": -1}, "min_tokens=-1 must be at least 0."),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must be at most max_tokens=4."),
        ({"top_logprobs": 21}, "top_logprobs=21 must be in [0, 20]."),
    ],
)
def test_bad_sampling_parameters_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**changes)
    assert str(caught.value) == message


def test_what_ends_a_request_and_what_needs_a_slot():
    assert SamplingParams(stop_token_ids=(1,), eos_token_ids=(2, 3)).end_token_ids == (1, 2, 3)
    assert SamplingParams(stop_token_ids=(1,), eos_token_ids=(2, 3), ignore_eos=True).end_token_ids == (1,)
    plain = SamplingParams(temperature=1, min_p=0.1, top_k=4, eos_token_ids=(2,), min_tokens=0, top_logprobs=5)
    assert not plain.needs_slot and not SamplingParams().needs_slot
    assert not dataclasses.replace(plain, min_tokens=3, ignore_eos=True).needs_slot, "there is nothing to mask"
    for change in (
        {"min_tokens": 3},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": ((1, 2),)},
    ):
        assert dataclasses.replace(plain, **change).needs_slot, change
