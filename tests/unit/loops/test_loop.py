"""Test a whole run from its first prompt to its last checkpoint, with faults."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
import xxhash

from coati_rl.errors import RunError
from coati_rl.types import Score
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.metric_names import ROLLOUT_RUN

GRPO = {"algo": "GRPO"}  # the default, with a reference model
ALL_PROMPTS = [f"train-{i}.0" for i in range(8)]


def trained_prompts(trace):
    lines = [line for file in sorted(trace.paths.rollouts.iterdir()) for line in file.read_text().split("\n")[:-1]]
    return sorted(record["uid"] for record in map(json.loads, lines) if record["is_trained"] and record["sample"] == 0)


@pytest.fixture(scope="module")
def trace(run_in_threads):
    return run_in_threads(GRPO)


def test_a_run_trains_syncs_saves_and_ends(trace):
    assert [type(work) for work in trace.work] == [
        SyncWork,  # no engine serves what it read from disk
        *(TrainWork, TrainWork, SyncWork),
        *(TrainWork, TrainWork, SyncWork),
        SaveWork,
        FinishWork,
    ]
    assert [record["step"] for record in trace.steps] == [1, 2, 3, 4]
    assert trace.of("finished") == [{"event": "finished", "step": 4, "groups_dropped": 0, "groups_filtered": 0}]


def test_every_prompt_is_trained_exactly_once(trace):
    assert trained_prompts(trace) == ALL_PROMPTS


def test_a_step_has_every_metric_and_no_other(trace):
    for record in trace.steps:
        assert set(record) - {"event"} == ROLLOUT_RUN


def test_lockstep_trains_on_the_newest_weights_only(trace):
    assert [record["staleness_max"] for record in trace.steps] == [0, 0, 0, 0]
    assert all(record["logprob_gap_mean"] is not None for record in trace.steps)


def test_producers_sample_with_the_weights_of_the_last_sync(trace):
    versions = {group.prompt.uid: group.oldest_version for group in trace.groups}
    assert sorted(versions.values()) == [0] * 4 + [2] * 4
    assert trace.engines[0].policy_version == 4, "the last weights go out too"


def test_what_producers_commit_is_byte_for_byte_what_the_trainer_holds(trace):
    hasher = xxhash.xxh3_128()
    for weight in trace.weights.values():
        hasher.update(weight.contiguous().numpy().tobytes())
    assert trace.of("sync")[-1]["digest"] == hasher.hexdigest()
    assert trace.of("sync")[0]["digest"] != hasher.hexdigest()


def test_the_checkpoint_is_the_trained_model(trace):
    from transformers import AutoModelForCausalLM

    (event,) = trace.of("checkpoint")
    assert event["path"] == str(trace.paths.checkpoints / "step-4")
    loaded = dict(AutoModelForCausalLM.from_pretrained(event["path"], dtype=torch.float32).named_parameters())
    for name, weight in trace.weights.items():
        torch.testing.assert_close(loaded[name].detach(), weight, rtol=0, atol=0)


def test_a_run_is_repeatable(trace, run_in_threads):
    again = run_in_threads(GRPO)
    assert again.responses == trace.responses
    for name, weight in trace.weights.items():
        torch.testing.assert_close(again.weights[name], weight, rtol=0, atol=0)


def test_the_reward_decides_which_way_the_weights_go(trace, run_in_threads):
    def indifferent(response, ground_truth):
        return Score(reward=0.5, answer_correct=False, format_valid=True, verdict="wrong")

    without = run_in_threads({"kl_coeff": 0.0, "weight_decay": 0.0}, score=indifferent)
    assert [record["grad_norm"] for record in without.steps] == [0.0] * 4
    assert all(record["grad_norm"] > 0 for record in trace.steps)


def test_running_one_rollout_step_ahead_bounds_staleness_by_one_sync(run_in_threads):
    # The trainer starts when both rollout steps of slots are full, all sampled with the start weights.
    trace = run_in_threads({"n_behind": 1}, hold_trainer=True)
    assert [record["staleness_max"] for record in trace.steps] == [0, 0, 1, 1]
    assert trained_prompts(trace) == ALL_PROMPTS


def test_mini_batches_that_stream_give_the_gradient_of_the_whole_batch(trace, run_in_threads):
    streamed = run_in_threads({**GRPO, "train_minibatch_size": 1, "train_microbatch_size": 1})
    assert sum(isinstance(work, TrainWork) for work in streamed.work) == 8  # two a step
    assert streamed.responses == trace.responses
    for name, gradient in trace.gradients[0].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(streamed.gradients[0][name], gradient, rtol=0, atol=1e-5 * scale)
    for one, other in zip(streamed.steps, trace.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_two_producers_share_the_prompts_and_both_get_the_weights(run_in_threads):
    trace = run_in_threads({"num_inferencer": 2, "inference_batch_size": 2, "inference_microbatch_size": 1})
    assert trained_prompts(trace) == ALL_PROMPTS
    assert [event["producers"] for event in trace.of("sync")][-2:] == [[0, 1], [0, 1]]
    assert [engine.policy_version for engine in trace.engines] == [4, 4]


@pytest.mark.parametrize(
    ("replace", "request_number"),
    [
        (True, 2),
        *(pytest.param(True, number, marks=pytest.mark.full) for number in (1, 3)),
        *(pytest.param(False, number, marks=pytest.mark.full) for number in (1, 2, 3)),
    ],
)
def test_a_producer_that_dies_costs_no_prompt(run_in_threads, replace, request_number):
    sizes = {"num_inferencer": 2, "inference_batch_size": 2}
    trace = run_in_threads(sizes, dies_at_request=request_number, replace=replace)
    assert trained_prompts(trace) == ALL_PROMPTS
    lost = trace.of("producer_lost")
    # Its prompt may have come ahead of a commit, which then fails as well: either may be heard first.
    assert all(event["cause"].endswith(("the engine died", ": the engine is closed")) for event in lost)
    assert {event["producer"] for event in lost} <= {0}


def test_the_only_producer_dies_and_its_replacement_gets_current_weights_before_its_first_prompt(run_in_threads):
    trace = run_in_threads(dies_at_request=6)  # in the second rollout step
    assert trained_prompts(trace) == ALL_PROMPTS
    assert len(trace.of("producer_lost")) == 1
    versions = {g.prompt.uid: (g.producer_id, g.oldest_version) for g in trace.groups}
    assert all(version >= 2 for producer, version in versions.values() if producer == 1)
    assert Counter(producer for producer, _ in versions.values())[1] >= 3


@pytest.mark.full
def test_a_prompt_that_is_issued_again_is_answered_alike(run_in_threads):
    # K = 1: the replacement has the weights that its predecessor had, and not those of a step in between.
    sizes = {"inference_batch_size": 2}
    whole, again = run_in_threads(sizes), run_in_threads(sizes, dies_at_request=4)
    assert len(again.of("producer_lost")) == 1
    assert again.responses == whole.responses


def test_a_producer_that_dies_in_an_evaluation_costs_no_answer(run_in_threads, write_prompts):
    evaluation = {"eval_dataset": {"math": write_prompts("math", 4)}, "eval_interval": 2}
    trace = run_in_threads(evaluation, dies_at_request=3)
    assert [(event["step"], event["num_failed"]) for event in trace.of("evaluation")] == [(0, 0), (2, 0), (4, 0)]
    assert len(trace.of("producer_lost")) == 1
    assert trained_prompts(trace) == ALL_PROMPTS


@pytest.mark.full
@pytest.mark.parametrize("mini_batch", [1, 2])
def test_prompts_that_fill_no_step_are_dropped_and_counted(run_in_threads, write_prompts, mini_batch):
    sizes = {"train_minibatch_size": mini_batch, "train_microbatch_size": 2}
    trace = run_in_threads({"dataset": write_prompts("train", 9), **sizes})
    assert trace.of("finished")[0] == {"event": "finished", "step": 4, "groups_dropped": 1, "groups_filtered": 0}
    assert len(trace.groups) == 9


def test_a_prompt_the_engine_refuses_is_counted_and_the_run_goes_on(run_in_threads, tokenizer):
    refused = tuple(tokenizer("u:trainx\na:", add_special_tokens=False)["input_ids"])
    trace = run_in_threads({"max_failure_rate": 1.0}, fails={refused})
    (failure,) = trace.of("rollout_failed")
    assert (failure["uid"], failure["cause"]) == ("train-1.0", "refused")
    assert trace.of("finished")[0]["step"] == 3, "seven prompts are left: three steps, one dropped"
    assert trace.of("finished")[0]["groups_dropped"] == 1
    assert sum(record["samples_failed"] for record in trace.steps) == 2


def test_more_failures_than_allowed_end_the_run(run_in_threads, tokenizer):
    refused = tuple(tokenizer("u:trainx\na:", add_special_tokens=False)["input_ids"])
    with pytest.raises(RunError, match=r"2 samples of one step failed or could not be scored, 0 are allowed"):
        run_in_threads({"max_failure_rate": 0.1}, fails={refused})  # 10 % of 4 samples


@pytest.mark.full
def test_samples_without_a_verdict_change_neither_loss_nor_denominator(run_in_threads):
    def undecided(response, ground_truth):
        return Score(reward=float("nan"), answer_correct=False, format_valid=False, verdict="invalid")

    def some_undecided(response, ground_truth):
        decided = Score(reward=float(len(response) % 3), answer_correct=True, format_valid=True, verdict="ok")
        return undecided(response, ground_truth) if len(response) % 4 == 0 else decided

    trace = run_in_threads({"max_failure_rate": 1.0, "num_generations": 4}, score=some_undecided)
    assert sum(record["samples_invalid"] for record in trace.steps) > 0
    for record in trace.steps:
        assert np.isfinite([record["reward_mean"], record["loss"], record["grad_norm"]]).all()


def test_evaluations_are_greedy_and_use_the_weights_they_are_named_after(run_in_threads, write_prompts):
    # K = 2, every 3 steps: at the start, at the sync after step 4 (the first one past 3), which is the last one too.
    trace = run_in_threads({"eval_dataset": {"math": write_prompts("math", 3)}, "eval_interval": 3})
    assert [(event["step"], event["num_prompts"]) for event in trace.of("evaluation")] == [(0, 3), (4, 3)]
    evaluated = [group for group in trace.groups if group.prompt.purpose == "eval"]
    assert [group.oldest_version for group in evaluated] == [0] * 3 + [4] * 3
    assert {len(group.scores) for group in evaluated} == {1}
    asked = {f"lease-{lease.lease_id}": lease.prompt.purpose for lease in trace.leases}
    temperatures = {(asked[r.request_id], r.sampling.temperature) for r in trace.engines[0].requests}
    assert temperatures == {("train", 1.0), ("eval", 0.0)}
    assert sorted(file.name for file in trace.paths.evaluation.iterdir()) == [
        "math-step-000000.jsonl",
        "math-step-000004.jsonl",
        "summary.jsonl",
    ]
    assert trained_prompts(trace) == ALL_PROMPTS


@pytest.mark.full
def test_several_episodes_sample_every_prompt_afresh(run_in_threads):
    trace = run_in_threads({"num_episodes": 2})
    assert trained_prompts(trace) == sorted(f"train-{i}.{episode}" for i in range(8) for episode in range(2))
    assert trace.responses["train-0.0"] != trace.responses["train-0.1"]
