"""Test that a run goes on when its coordinator alone is killed or stopped, and ends with the undisturbed run's bits."""

import json

import pytest

from tests.faults.test_pairwise import HEARTBEAT_S, REWARD, trained, weights

STEPS = 8
# Phase -> how often it is reached before the kill: in the first steps, and later.
MOMENTS = {"generation": (3, 14, 27), "staging": (1, 3, 6), "commit": (1, 4), "step": (2, 5), "save": (1, 3, 4)}
GOES_ON_S = 60


@pytest.fixture(scope="module")
def job(make_tiny, flags, tmp_path_factory):
    """The flags of all runs: two trainer ranks, two producers, evaluations and checkpoints."""
    reward = tmp_path_factory.mktemp("reward") / "own_reward.py"
    reward.write_text(REWARD)
    model = make_tiny(tied=True)
    evaluation = ["-ed", json.dumps({"own": str(model / "eval.jsonl")}), "-ei", 2]
    options = ["-b", "fake", "-rt", f"{reward}:score", "-si", 2, "--max-steps", STEPS, "-lr", 1e-4]
    return [*flags(model, trainers=2), *options, *evaluation, "--heartbeat-timeout-s", HEARTBEAT_S]


@pytest.fixture(scope="module")
def undisturbed(job, start_shared_run):
    run = start_shared_run(*job, "-nb", 0, name="undisturbed")
    assert run.wait() == 0, run.text()
    return run


def assert_goes_on(run, job, kill):
    assert run.wait() == 0, run.text()
    assert run.text().count("the coordinator was lost; another goes on from the ledger") == 1, run.text()
    assert [record["step"] for record in run.records()] == [*range(1, STEPS + 1)]
    rows = trained(run)
    assert len(rows) == len({(uid, sample) for _, uid, sample in rows}) == STEPS * 4 * 4, "steps x prompts x samples"
    killed_s = float(run.run_dir.with_name(f"{run.run_dir.name}.signalled-{kill['phase']}-coordinator").read_text())
    (taken_over,) = [each for each in run.timeline("driver") if each.get("name") == "coordinator_replaced"]
    assert taken_over["begin_ns"] / 1e9 - killed_s < GOES_ON_S
    evaluations = [json.loads(line) for line in (run.run_dir / "eval" / "summary.jsonl").open()]
    assert [each["step"] for each in evaluations] == [0, 2, 4, 6, 8]
    assert run.left_over() == []


def kill_at(phase, number):
    return {"phase": phase, "nth": number, "victim": "coordinator", "signal": "SIGKILL"}


def assert_lockstep_is_the_undisturbed_run(start_run, job, undisturbed, phase, number):
    kill = kill_at(phase, number)
    run = start_run(*job, "-nb", 0, signals=[kill])
    assert_goes_on(run, job, kill)
    assert trained(run) == trained(undisturbed)
    assert weights(run, STEPS) == weights(undisturbed, STEPS)


@pytest.mark.full
def test_a_run_whose_coordinator_is_killed_goes_on_and_has_the_undisturbed_runs_weights(start_run, job, undisturbed):
    assert_lockstep_is_the_undisturbed_run(start_run, job, undisturbed, "generation", 14)


@pytest.mark.full
@pytest.mark.parametrize(("phase", "number"), [(p, n) for p, ns in MOMENTS.items() for n in ns])
def test_killed_in_any_phase_in_lockstep(start_run, job, undisturbed, phase, number):
    assert_lockstep_is_the_undisturbed_run(start_run, job, undisturbed, phase, number)


@pytest.mark.full
@pytest.mark.parametrize(("phase", "number"), [(p, ns[-1]) for p, ns in MOMENTS.items()])
def test_killed_in_any_phase_one_step_ahead_with_two_producers(start_run, job, phase, number):
    kill = kill_at(phase, number)
    run = start_run(*job, "-nb", 1, "-i", 2, "-ibs", 2, "-imbs", 2, signals=[kill])
    assert_goes_on(run, job, kill)


@pytest.mark.full
def test_killed_again_and_again(start_run, job, undisturbed):
    run = start_run(*job, "-nb", 0, signals=[kill_at("generation", 5), kill_at("step", 4), kill_at("save", 4)])
    assert run.wait() == 0, run.text()
    assert run.text().count("the coordinator was lost; another goes on from the ledger") == 3, run.text()
    assert weights(run, STEPS) == weights(undisturbed, STEPS)


@pytest.mark.full
def test_a_stopped_coordinator_is_replaced(start_run, job, undisturbed):
    run = start_run(*job, "-nb", 0, signals=[{**kill_at("step", 3), "signal": "SIGSTOP"}])
    assert run.wait() == 0, run.text()
    assert weights(run, STEPS) == weights(undisturbed, STEPS)
    assert run.left_over() == []
