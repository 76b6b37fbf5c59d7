"""Runs a state machine from many seeds.

Hypothesis builds most examples of one run from each other, so a few runs from different seeds see more than one long run.
"""

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run(machine: type[RuleBasedStateMachine], seeds: range, *, shrink: bool = True) -> None:
    """Runs six examples of up to 50 rules from each seed.

    Args:
        machine: the state machine.
        seeds: the same seed gives the same run.
        shrink: whether a failure is to be made small.
    """
    chosen = settings(
        max_examples=6,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    for seed in seeds:
        seeded = hypothesis.seed(seed)(type(machine.__name__, (machine,), {}))
        try:
            run_state_machine_as_test(seeded, settings=chosen)
        except BaseException as error:
            error.add_note(f"{machine.__name__}, {seed=}")
            raise
