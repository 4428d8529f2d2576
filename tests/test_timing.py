"""What of the timing can be shown without a GPU: which calls a replay makes."""

from __future__ import annotations

import random

import pytest

from verifier.timing import MIN_GRAPH_US, CallPlan

CALLS = ["a", "b", "c", "d"]


def plans(n: int, pass_us: float) -> list[list[str]]:
    return [CallPlan(random.Random(seed))(CALLS, pass_us) for seed in range(n)]


@pytest.mark.parametrize("pass_us", [40.0, 400.0, 1499.0, 5000.0])
def test_a_replay_lasts_long_enough_and_uses_every_set_equally(pass_us):
    for plan in plans(50, pass_us):
        passes = len(plan) // len(CALLS)
        assert len(plan) == passes * len(CALLS) and passes * pass_us >= MIN_GRAPH_US
        assert all(plan.count(c) == passes for c in CALLS)


def test_between_two_calls_on_one_set_all_others_are_used():
    """Otherwise a set would still be in L2; also over the seam from one replay to the next."""
    for plan in plans(50, 100.0):
        twice = plan + plan
        for i in range(len(plan)):
            assert set(twice[i : i + len(CALLS)]) == set(CALLS)


@pytest.mark.parametrize("pass_us", [40.0, 400.0, 5000.0])
def test_neither_the_number_of_calls_nor_the_first_set_can_be_known(pass_us):
    found = plans(200, pass_us)
    assert len({len(p) for p in found}) >= 2
    assert {p[0] for p in found} == set(CALLS)
    assert len({tuple(p[: len(CALLS)]) for p in found}) > 12


def test_subjects_of_one_benchmark_last_alike():
    """What a replay costs beside its calls must not weigh more on one subject than on another."""
    for seed in range(50):
        plan = CallPlan(random.Random(seed))
        fast, slow = (len(plan(CALLS, us)) / len(CALLS) * us for us in (100.0, 110.0))
        assert abs(fast - slow) <= 220.0
