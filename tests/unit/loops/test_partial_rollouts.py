"""Test that responses go on over rollout steps: each prompt is trained once, and no token is staler than the bound."""

import json

import numpy as np
import pytest

from coati_rl.checkpoint.position import read_data_state
from coati_rl.work import SaveWork
from tests.unit.loops.stepped_core import SteppedCore

NUM_PROMPTS = 16
PARTIAL = {"partial_rollouts": True, "n_behind": 2, "inference_batch_size": 2, "max_new_tokens": 64, "save_interval": 2}


@pytest.fixture(scope="module")
def run_partial(run_in_threads, write_prompts):
    """Run with an engine that samples a token a step."""
    fields = {**PARTIAL, "dataset": write_prompts("train", NUM_PROMPTS)}

    def run(changes=None, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("producer.engines.fake_engine._FakeCore", SteppedCore)
            return run_in_threads({**fields, **(changes or {})}, **options)

    return run


@pytest.fixture(scope="module")
def trace(run_partial):
    return run_partial()


def trained(trace):
    """(step, uid) of each prompt in the loss, by step."""
    lines = [line for file in sorted(trace.paths.rollouts.iterdir()) for line in file.read_text().split("\n")[:-1]]
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["uid"]) for record in records if record["is_trained"] and record["sample"] == 0]


def check_once(trained_prompts):
    assert sorted(uid for _, uid in trained_prompts) == sorted(f"train-{number}.0" for number in range(NUM_PROMPTS))


def versions(trace):
    """The policy versions of each response's tokens, with its prompt's uid."""
    return [(group.prompt.uid, each.policy_versions) for group in trace.groups for each in group.trajectories]


@pytest.mark.full
def test_each_prompt_is_trained_once_and_no_token_is_staler_than_the_bound(trace):
    check_once(trained(trace))
    assert {step["staleness_max"] for step in trace.steps} <= {0, 1, 2}
    assert len(trace.steps) == NUM_PROMPTS // 2


def test_a_response_goes_on_under_new_weights_and_its_tokens_keep_their_versions(trace):
    assert set(trace.engines[0].commits_in_flight) == {True}
    assert any(len(set(each.tolist())) > 1 for _, each in versions(trace))
    assert all((np.diff(each) >= 0).all() for _, each in versions(trace))
    for group in trace.groups:
        for each in group.trajectories:
            assert len(each.policy_versions) == len(each.logprobs) == each.loss_mask.sum()


def test_each_sample_is_a_request_with_the_seed_that_it_has_in_its_group(trace):
    requests = {}
    for request in trace.engines[0].requests:
        assert request.num_samples == 1
        requests.setdefault(request.request_id.partition("/")[0], []).append(request.sampling.seed)
    seeds = {f"lease-{lease.lease_id}": [lease.sampling.seed, lease.sampling.seed + 1] for lease in trace.leases}
    assert requests == seeds


@pytest.mark.full
def test_a_producer_that_is_killed_with_cut_responses_loses_and_doubles_nothing(run_partial):
    trace = run_partial(dies_at_request=21)
    assert len(trace.engines) == 2
    check_once(trained(trace))
    assert {step["staleness_max"] for step in trace.steps} <= {0, 1, 2}
    (lost,) = trace.of("producer_lost")
    assert lost["prompts_reissued"] >= 1


@pytest.mark.full
def test_a_resumed_run_samples_cut_responses_again_and_trains_each_prompt_once(trace, run_partial):
    saves = [work for work in trace.work if isinstance(work, SaveWork)]
    save, position = max(
        ((save, read_data_state(save.data_state)[0]) for save in saves), key=lambda pair: len(pair[1].waiting)
    )
    assert position.waiting, "no response was cut when a checkpoint was written"
    checkpoint = trace.paths.checkpoints / f"step-{save.step}"
    resumed = run_partial({"checkpoint_path": str(checkpoint)})
    before = [(step, uid) for step, uid in trained(trace) if step <= save.step]
    after = [(step, uid) for step, uid in trained(resumed) if step > save.step]
    check_once([*before, *after])
    assert {step["staleness_max"] for step in resumed.steps} <= {0, 1, 2}
    assert all(each.min() >= save.step for uid, each in versions(resumed) if uid in position.waiting)
