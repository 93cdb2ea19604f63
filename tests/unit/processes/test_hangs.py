"""Test what counts as a hang, and who is named."""

import pytest

from coati_rl.observability.phases import Phase
from coati_rl.processes.hangs import HangTimeouts, describe_phases, judge_producer, judge_trainers

PATIENCE = HangTimeouts(heartbeat_s=30.0, phase_s=60.0, floors={"sync": 120.0})


def phase(name, seconds, *, median_s=1.0, path=None, item=None, **more):
    return Phase(name=name, path=path or name, item=item, seconds=seconds, median_s=median_s, **more)


@pytest.mark.parametrize(
    ("name", "median_s", "limit_s"),
    [
        ("train", 1.0, 60.0),  # the floor
        ("train", 20.0, 200.0),  # ten times its own median
        ("train", None, 600.0),  # the first
        ("sync", 1.0, 120.0),  # its producers have a deadline of their own
        ("sync", None, 600.0),
        ("wait for work", 1.0, None),
        ("commit weights", 1.0, None),  # waits for long responses, with a deadline; "engine commit" is its swap
    ],
)
def test_a_phase_may_take_ten_times_its_median_and_a_minute_at_least(name, median_s, limit_s):
    assert PATIENCE.limit_s(phase(name, 0.0, median_s=median_s)) == limit_s


def test_a_producer_hangs_in_the_phase_that_is_over_its_limit():
    step = phase("engine step", 61.0, median_s=0.02, where="vllm_engine.py:88 in step")
    assert judge_producer([phase("rollout loop", 0.1), step], PATIENCE) == (
        "'engine step' is not done after 61 s, at vllm_engine.py:88 in step (limit 60 s, its median is 0.02 s)"
    )
    assert judge_producer([phase("engine step", 60.0), phase("wait for prompts", 1e6)], PATIENCE) is None


def in_item(number, *more):
    """A trainer in an item of work since 5 s, and in more phases."""
    return (phase("train", 5.0, item=number), *more)


def test_a_trainer_in_a_phase_over_its_limit_hangs():
    inner = phase("forward_backward", 61.0, path="train (step 7) > forward_backward", item=3, where="loss.py:8 in loss")
    assert judge_trainers({"trainer-0": in_item(3, inner)}, PATIENCE) == (
        "trainer-0 hangs: 'train (step 7) > forward_backward' is not done after 61 s, at loss.py:8 in loss "
        "(limit 60 s, its median is 1 s); the run waits for it"
    )


def test_trainers_that_wait_for_one_that_still_computes_do_not_hang():
    phases_of = {
        "trainer-0": in_item(3, phase("forward_backward", 80.0, item=3, median_s=20.0)),
        "trainer-1": in_item(3, phase("optimizer step", 70.0, item=3)),
    }
    assert judge_trainers(phases_of, PATIENCE) is None


def test_a_trainer_that_is_ahead_waits_for_those_at_an_earlier_item():
    saves = phase("save", 80.0, item=3, median_s=None)
    ahead = (phase("train", 70.0, item=4),)
    assert judge_trainers({"trainer-0": (saves,), "trainer-1": ahead}, PATIENCE) is None
    saves = phase("save", 601.0, item=3, median_s=None)
    problem = judge_trainers({"trainer-0": (saves,), "trainer-1": ahead}, PATIENCE)
    assert problem.startswith("trainer-0 hangs: 'save' is not done after 601 s (limit 600 s, the first one)")
    assert problem.endswith("; trainer-1 (train) and the run wait for it")


def test_of_two_that_are_late_the_one_outside_a_collective_is_named():
    def late(**more):
        return in_item(3, phase("forward_backward", 61.0, item=3, **more))

    problem = judge_trainers({"trainer-0": late(is_in_collective=True), "trainer-1": late()}, PATIENCE)
    assert problem.startswith("trainer-1 hangs: ")


def test_a_trainer_between_two_items_moves():
    late = in_item(3, phase("forward_backward", 61.0, item=3))
    assert judge_trainers({"trainer-0": late, "trainer-1": ()}, PATIENCE) is None


def test_what_an_actor_does_is_told_by_its_innermost_phases():
    phases = [phase("train", 1, path="train"), phase("step", 1, path="train > step"), phase("engine step", 1)]
    assert describe_phases(phases) == "train > step, engine step"
    assert describe_phases([]) == "no phase"
