"""Test whole runs on emulated GPUs: they learn, go on after a kill, and have the numbers of the CPU."""

import json
import re
import shlex

import pytest

from tests.integration.runs.conftest import Run
from tests.integration.runs.records import (
    assert_complete,
    assert_engine_and_trainer_agree,
    assert_weights_moved,
    lines,
    read_rollouts,
)
from tests.integration.runs.test_offline import JobRun, evaluations, tensors
from tests.integration.runs.test_turns import one_core  # noqa: F401, a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.full, pytest.mark.timeout(1800)]
PATIENCE_S = 1500
ENGINE = ("--enforce-eager", "--gpu-memory-utilization", 0.5)
EAGER = (*ENGINE, "--precision", "fp32")
BF16_GAP = 0.02  # nats, mean of a step
AGENT = '''
class Asks:
    """Ask twice; the second answer is paid."""

    def reset(self, task):
        pass

    def step(self, action):
        return [{"role": "user", "content": "And once more?"}], float("2" in action.text), action.turn == 1, {}
'''


@pytest.fixture(autouse=True)
def small_gpus(monkeypatch):
    monkeypatch.setenv("COATI_EMULATED_GPU_BYTES", str(2**31))  # of which vLLM fills its share with its cache


def finished(run: Run) -> Run:
    assert run.wait(PATIENCE_S) == 0, run.text()
    return run


def left_over(run: Run) -> list:
    """What a run leaves on a machine with GPUs: the emulator's files are memory of NCCL, which its process frees."""
    return [each for each in run.left_over() if "emulated-nccl" not in str(each)]


def test_two_trainers_and_an_engine_learn_what_is_held_out(make_tiny, start_run, flags, tmp_path):
    model = make_tiny(tied=True)
    for name in ("train.jsonl", "eval.jsonl"):  # the untrained model answers 2, greedily
        wrong = (model / name).read_text().replace('"gt_answer": "2"', '"gt_answer": "1"')
        (tmp_path / name).write_text(wrong)
    held_out = json.dumps({"guess": str(tmp_path / "eval.jsonl")})
    job = (*flags(model, trainers=2, samples=8), *ENGINE, "-zero", 1, "-ed", held_out, "-ei", 8, "--max-steps", 8)
    run = finished(start_run(*job, "-d", tmp_path / "train.jsonl", "-mnt", 8))
    records = assert_complete(run, steps=8)
    assert_weights_moved(records)
    assert max(record["logprob_gap_mean"] for record in records) < BF16_GAP
    accuracy = [each["accuracy"] for each in lines(run.run_dir / "eval" / "summary.jsonl")]
    assert accuracy[-1] >= accuracy[0] + 0.5, accuracy
    assert left_over(run) == []


def test_a_run_whose_trainer_is_killed_goes_on_to_the_same_bits(make_tiny, start_run, flags):
    job = (*flags(make_tiny(tied=True), trainers=2), *EAGER, "--plugin", "fsdp2", "-si", 1, "--max-steps", 4)
    whole = finished(start_run(*job))
    assert_weights_moved(whole.records())
    killed = start_run(*job, name="killed")
    killed.wait_for_step(2, PATIENCE_S)
    killed.processes("ray::TrainerActor")[0].kill()
    assert killed.wait(PATIENCE_S) == 1, killed.text()
    resume = re.search(r"resume from step \d+ with: \S+ \S*rl_example\.py (.*)$", killed.text().splitlines()[-1])
    assert resume, killed.text()
    resumed = finished(start_run(*shlex.split(resume[1]), name="killed"))
    assert tensors(resumed, 4) == tensors(whole, 4) and tensors(whole, 4)
    assert read_rollouts(resumed) == read_rollouts(whole)
    assert left_over(resumed) == []


@pytest.mark.usefixtures("one_core")
def test_an_engine_and_a_trainer_that_share_one_gpu_have_the_bits_of_two(make_tiny, start_run, flags, monkeypatch):
    job = (*flags(make_tiny(tied=True)), *EAGER, "-nb", 0, "--old-logprobs", "trainer", "-si", 2, "--max-steps", 4)
    apart = finished(start_run(*job, name="apart"))
    monkeypatch.setenv("COATI_EMULATED_GPU_COUNT", "1")
    in_turns = finished(start_run(*job, "--colocate", name="in-turns"))
    assert_weights_moved(in_turns.records())
    assert tensors(in_turns, 4) == tensors(apart, 4) and tensors(apart, 4)
    # Log-probabilities round by the requests that met in the engine; trainers compute their own.
    fields = ("uid", "sample", "token_ids", "reward", "advantage", "policy_versions")
    rollouts = [[[row[field] for field in fields] for row in read_rollouts(run)] for run in (in_turns, apart)]
    assert rollouts[0] == rollouts[1]
    assert left_over(in_turns) == []


def test_a_critic_is_trained_beside_the_policy(make_tiny, start_run, flags):
    job = (*flags(make_tiny(tied=True), trainers=2), *ENGINE, "-a", "PPO", "-kl", 0.01, "-zero", 1, "-si", 2)
    records = assert_complete(finished(start_run(*job, "--max-steps", 2)), steps=2)
    assert_weights_moved(records)
    assert max(record["logprob_gap_mean"] for record in records) < BF16_GAP
    assert all(record["value_grad_norm"] > 0 for record in records)
    assert records[0]["value_mean"] == 0 != records[1]["value_mean"]


def test_an_agent_s_turns_are_trained(make_tiny, start_run, flags, tmp_path):
    (tmp_path / "asks.py").write_text(AGENT)
    environment = ("--env", f"{tmp_path}/asks.py:Asks", "-rt", "env", "--max-turns", 3, "--max-episode-tokens", 320)
    run = start_run(*flags(make_tiny(tied=True)), *EAGER, *environment, "-mpt", 128, "--max-steps", 2)
    finished(run)
    records = assert_complete(run, steps=2)
    assert_engine_and_trainer_agree(records)
    assert all(record["turns_mean"] == 2.0 for record in records)


@pytest.mark.parametrize("job", ["sft", "dpo"])
def test_a_job_on_a_dataset_has_the_losses_of_the_cpu(tmp_path, job_flags, job):
    found = {}
    for device in ("cpu", "cuda"):
        base = job_flags(job, trainers=2, dp=2, epochs=1)
        base[base.index("--device") + 1] = device
        run = JobRun([*map(str, base), "--precision", "fp32"], tmp_path / device)
        try:
            finished(run)
        finally:
            run.end()
        found[device] = [record["loss"] for record in run.records()], evaluations(run)[-1]["loss"]
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], abs=1e-5)
    assert found["cuda"][1] == pytest.approx(found["cpu"][1], abs=1e-5)
    assert len(found["cpu"][0]) == 4
