"""Test that a loop of one's own takes the steps of a run."""

import numpy as np
import pytest
import torch

import coati
from coati_rl.work import TrainWork
from producer.engine_client import Completion

STEPS = {"num_episodes": 2, "max_steps": 5}


@pytest.fixture(scope="module")
def run(run_in_threads):
    return run_in_threads({**STEPS, "algo": "GRPO"}, hold_trainer=True)


def completions_of(group):
    prompt_ids = np.array(group.prompt.token_ids, dtype=np.int32)
    return [
        Completion(
            prompt_ids=prompt_ids,
            uid=group.prompt.uid,
            number=number,
            temperature=group.temperature,
            token_ids=one.token_ids[one.loss_mask],
            logprobs=one.logprobs,
            policy_versions=one.policy_versions,
            finish_reason="stop",
            text=one.text,
        )
        for number, one in enumerate(group.trajectories)
    ]


def groups_of(trace, work):
    """The groups that a mini-batch trains, by uid, as a run sorts them."""
    trained = {tuple(ids) for ids in work.batch.samples.split().token_ids}
    found = [g for g in trace.groups if {tuple(t.token_ids[t.loss_mask]) for t in g.trajectories} <= trained]
    return sorted(found, key=lambda group: group.prompt.uid)


def test_five_steps_have_the_weights_of_a_run_bit_for_bit(run, small_run):
    names = ("max_prompt_tokens", "max_new_tokens", "train_microbatch_size")
    flags = {name: small_run[name] for name in names}
    rates = [step["learning_rate"] for step in run.steps]
    with coati.Trainer(small_run["model"], "grpo", **flags) as trainer:
        works = [work for work in run.work if isinstance(work, TrainWork)]
        assert len(works) == 5
        for work, rate, step in zip(works, rates, run.steps, strict=True):
            samples = []
            for group in groups_of(run, work):
                samples += coati.group_samples(completions_of(group), [score.reward for score in group.scores])
            trainer.forward_backward(samples)
            metrics = trainer.optim_step(rate)
            assert metrics["loss"] == step["loss"]
            assert metrics["grad_norm"] == step["grad_norm"]
        weights = dict(trainer.members._member._backend.export_weights())
    assert weights.keys() == run.weights.keys()
    assert all(torch.equal(weight, run.weights[name]) for name, weight in weights.items())
