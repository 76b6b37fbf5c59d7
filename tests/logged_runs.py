"""Small runs of the engine with an event log: sessions that share a prefix, in a pool too small for them."""

import pathlib

import numpy as np

from penelope_jax.config import EngineConfig, policy_named
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.event_log import EventLogWriter
from penelope_jax.segments import SamplingParams, StepPlan
from penelope_jax.state import EngineState

PAGE = 4
NUM_SESSIONS = 4


def config_of(policy: str = "penelope", num_pages: int = 46) -> EngineConfig:
    return EngineConfig(
        device_tokens=num_pages * PAGE,
        page_size=PAGE,
        policy=policy_named(policy),
        max_context=160,
        max_running=3,
        max_step_tokens=32,
        max_step_segments=8,
        output_reserve=1,
        vocab_size=50,
    )


class WatchedExecutor(HashExecutor):
    """Keeps the plans it gets, and the driver's state at that moment."""

    def __init__(self):
        super().__init__(vocab_size=50)
        self.driver: Driver
        self.planned: list[tuple[StepPlan, EngineState]] = []

    def dispatch(self, plan):
        self.planned.append((plan, self.driver.state))
        return super().dispatch(plan)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 0.125
        return self.now_s


def run(
    path: pathlib.Path, policy: str = "penelope", *, overlap: bool = False, num_turns: int = 8, seed: int = 0
) -> tuple[Driver, WatchedExecutor]:
    """Plays sessions of several turns with stops, scores, aborts, a refusal, salts and flushes; writes a log."""
    random = np.random.default_rng(seed)
    config = config_of(policy)
    executor = WatchedExecutor()
    with EventLogWriter(path, config, {"seed": seed, "model": "none", "commit": "0123abcd"}) as log:
        driver = executor.driver = Driver(config, executor, Clock(), overlap=overlap, log=log)
        shared = random.integers(0, 50, 14).tolist()
        histories = [[*shared, *random.integers(0, 50, 10).tolist()] for _ in range(NUM_SESSIONS)]
        try:
            driver.submit([50], session_id="s0")
        except ValueError:
            pass
        for turn in range(num_turns):
            ids = {}
            for session in range(NUM_SESSIONS):
                sampling = SamplingParams(
                    max_tokens=int(random.integers(1, 12)),
                    stop_token_ids=(3,),
                    prompt_logprobs_from=0 if session == turn % 5 else None,
                )
                salt = "tenant" if session == 3 else ""
                prompt = np.array(histories[session], np.int32)
                ids[driver.submit(prompt, sampling, session_id=f"s{session}", cache_salt=salt)] = session
            if turn == 1:
                driver.step()
                driver.abort(min(ids))
                driver.abort(max(ids))
                driver.abort(999)
            while not driver.idle:
                for update in driver.step():
                    if hasattr(update, "token"):
                        histories[ids[update.request_id]].append(update.token)
            if turn == 5:
                driver.flush()
            for session in range(NUM_SESSIONS):
                histories[session].extend(random.integers(0, 50, int(random.integers(1, 14))).tolist())
        driver.step()
    return driver, executor


def write_small(path: pathlib.Path) -> pathlib.Path:
    """Writes a log of two steps with each kind of record; returns its path."""
    config = config_of()
    with EventLogWriter(path, config) as log:
        driver = Driver(config, HashExecutor(50), Clock(), log=log)
        driver.submit(np.arange(6), SamplingParams(max_tokens=2))
        driver.submit(np.arange(8), SamplingParams(max_tokens=2))
        driver.step()
        driver.abort(1)
        while not driver.idle:
            driver.step()
        driver.flush()
    return path


def record_borders(data: bytes) -> list[int]:
    """Returns where each record of a log starts, and where the last one ends."""
    position = data.index(b"\n") + 1
    borders = [position]
    while position < len(data):
        position += 9 + int.from_bytes(data[position + 1 : position + 5], "little") + 4
        borders.append(position)
    return borders
