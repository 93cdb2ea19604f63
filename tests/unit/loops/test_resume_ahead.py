"""Test that a run with producers ahead of its weights resumes from its checkpoints bit for bit."""

import json
import time

import pytest
import torch

from coati_rl.checkpoint.position import read_data_state
from coati_rl.work import SaveWork, SyncWork
from tests.unit.loops.harness import parity_reward

# The gap of tokens that earlier weights sampled is known as long as these are.
DIFFERS = {"time_s", "train_s", "rollout_wait_s", "sync_s", "producer_idle_fraction", "trainer_idle_fraction"}
DIFFERS |= {"step_s", "logprob_gap_mean", "logprob_gap_max", "logprob_gap_tokens"}
# -imbs is -ibs: all slots that a sync frees are leased at once.
K1 = {"inference_batch_size": 2, "inference_microbatch_size": 2}
K2 = {"inference_batch_size": 4, "inference_microbatch_size": 4}
RUNS = {
    "K = 1": {"n_behind": 1, "max_samples": 12, **K1},
    "K = 2": {"n_behind": 1, **K2},
    "two behind": {"n_behind": 2, **K1},
    "K = 2, old policy": {"n_behind": 1, "old_logprobs": "trainer", **K2},
    "greedy baseline": {"n_behind": 1, "algo": "REMAX", **K1},
}


def slow_reward(response, ground_truth):
    """Responses come in while the trainer steps: some of older weights are out when a checkpoint is due."""
    time.sleep(0.004)
    return parity_reward(response, ground_truth)


OPTIONS = {"score": slow_reward, "hold_trainer": True}


@pytest.fixture(scope="module")
def sizes(write_prompts):
    return {"save_interval": 1, "dataset": write_prompts("train", 16)}


@pytest.fixture(scope="module", params=RUNS)
def whole(request, run_in_threads, sizes):
    """A run that is not interrupted, with a checkpoint after each step, and its fields."""
    fields = {**sizes, **RUNS[request.param]}
    return run_in_threads(fields, **OPTIONS), fields


def samples_after(trace, step):
    """Return the records of later steps' samples, without times."""
    lines = [line for file in sorted(trace.paths.rollouts.iterdir()) for line in file.read_text().split("\n")[:-1]]
    return [record for record in map(json.loads, lines) if record["step"] > step]


def records_after(trace, step):
    return [{k: v for k, v in record.items() if k not in DIFFERS} for record in trace.steps if record["step"] > step]


@pytest.mark.sampled(6)
def test_a_run_resumed_from_any_of_its_checkpoints_is_the_uninterrupted_one(whole, run_in_threads):
    whole, fields = whole
    saves = [work for work in whole.work if isinstance(work, SaveWork)]
    assert max(record["staleness_max"] for record in whole.steps) == fields["n_behind"]
    ahead = [save.step for save in saves if read_data_state(save.data_state)[0].kept]
    assert len(ahead) >= 2
    for step in (ahead[0], ahead[-1]):
        checkpoint = whole.paths.checkpoints / f"step-{step}"
        trace = run_in_threads({**fields, "checkpoint_path": str(checkpoint)}, **OPTIONS)
        assert trace.prepared.resume.changes == ()
        assert samples_after(trace, step) == samples_after(whole, step)
        assert records_after(trace, step) == records_after(whole, step)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=0)


@pytest.mark.sampled(5)
def test_saving_does_not_change_a_run(whole, run_in_threads):
    whole, fields = whole
    trace = run_in_threads({**fields, "save_interval": -1}, **OPTIONS)
    assert samples_after(trace, 0) == samples_after(whole, 0)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=0)


@pytest.mark.full
def test_rollouts_of_other_settings_are_sampled_again(run_in_threads, sizes):
    fields = {**sizes, "n_behind": 1, **K1}
    whole = run_in_threads(fields, hold_trainer=True)
    changed = {**fields, "checkpoint_path": str(whole.paths.checkpoints / "step-3"), "temperature": 0.5, "n_behind": 0}
    save = next(work for work in whole.work if isinstance(work, SaveWork) and work.step == 3)
    num_kept = len(read_data_state(save.data_state)[0].kept)
    assert num_kept >= 2, "a rollout step is finished ahead of the checkpoint's weights"
    trace = run_in_threads(changed)
    assert trace.prepared.resume.changes == (
        "temperature was 1.0 and is 0.5 now",
        "n_behind was 1 and is 0 now",
        f"{num_kept} prompts with finished rollouts are therefore sampled again",
    )
    assert len(trace.groups) == 10 and {group.temperature for group in trace.groups} == {0.5}
    assert [record["staleness_max"] for record in trace.steps] == [0] * 5
    assert isinstance(trace.work[0], SyncWork)
