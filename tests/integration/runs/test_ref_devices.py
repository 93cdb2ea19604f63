"""Test runs whose reference and teacher have devices of their own (--ref-devices), beside runs that hold them."""

import time

import pytest

from tests.integration.runs.records import assert_engine_and_trainer_agree, read_rollouts
from tests.integration.runs.test_turns import numbers, one_core, tensors  # noqa: F401, a fixture

STEPS = 3
LAYOUTS = {
    "dp1": ("-t", 1),
    "dp2": ("-t", 2, "-tbs", 2, "-tMbs", 2),
    "fsdp2": ("-t", 2, "--plugin", "fsdp2", "-tbs", 2, "-tMbs", 2),
    "tp2": ("-t", 2, "-tp", 2, "-tbs", 4, "-tMbs", 4),
}


def job_of(make_tiny, flags, layout, *more):
    model = make_tiny(tied=True)
    teacher = ("--teacher", make_tiny(tied=True, obeys=True), "--distill-kl", "full")
    options = ("-b", "transformers", "-nb", 0, "--max-steps", STEPS, "-si", -1, "--old-logprobs", "trainer")
    return [*flags(model), *LAYOUTS[layout], *options, "-kl", 0.01, *teacher, *more]


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("layout", "devices"), [("dp1", 2), ("dp2", 1), ("dp2", 3)])
def test_every_bit_is_that_of_a_run_whose_trainers_hold_the_models(make_tiny, start_run, flags, layout, devices):
    job = job_of(make_tiny, flags, layout)
    held, apart = (start_run(*job, *more, name=f"run{len(more)}") for more in ((), ("--ref-devices", devices)))
    assert held.wait() == 0, held.text()
    assert apart.wait() == 0, apart.text()
    assert tensors(held, STEPS) == tensors(apart, STEPS) != {}
    # Which of two copies is first to get a prompt is a matter of time.
    rows = [sorted(read_rollouts(run), key=lambda row: (row["uid"], row["sample"])) for run in (held, apart)]
    assert rows[0] == rows[1]
    assert numbers(held) == numbers(apart) != []
    assert apart.left_over() == []


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_trainers_that_share_a_model_out_ask_too(make_tiny, start_run, flags, layout):
    run = start_run(*job_of(make_tiny, flags, layout, "--ref-devices", 1))
    assert run.wait() == 0, run.text()
    assert_engine_and_trainer_agree(run.records())
    assert [record["kl_mean"] >= 0 for record in run.records()] == [True] * STEPS
    assert run.left_over() == []


@pytest.mark.full
def test_a_scorer_that_is_killed_ends_the_run_in_time_with_its_name(make_tiny, start_run, flags):
    run = start_run(*job_of(make_tiny, flags, "dp1", "--ref-devices", 2, "--max-steps", 100))
    run.wait_for_step(1)
    killed = time.monotonic()
    for process in run.processes("ray::ScorerActor")[:1]:
        process.kill()
    assert run.wait() == 1, run.text()
    assert time.monotonic() - killed < 60
    assert "scorer-" in run.text().splitlines()[-1], run.text()
    assert run.left_over() == []
