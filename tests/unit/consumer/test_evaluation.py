"""Test the evaluation of held-out samples against plain transformers, and scores of samples one by one."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coati_rl.batching.dataset_source import DatasetSettings, evaluation_parts
from coati_rl.samples import Sample
from coati_rl.work import EvaluateWork
from consumer.backend import Backend
from consumer.evaluation import Evaluator, score_samples
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config

SETTINGS = DatasetSettings(dp=1, trainers_per_dp_rank=1, batch_size=2, micro_batch_size=2)


@pytest.fixture(scope="module")
def backend(model_dir):
    return Backend(backend_config(model_dir), SingleProcess(device=torch.device("cpu")))


@pytest.fixture(scope="module")
def samples():
    """Three samples of 5, 8 and 3 tokens; the second one's first half is not in the loss."""
    rng = np.random.default_rng(0)
    made = []
    for number, length in enumerate((5, 8, 3)):
        loss_mask = np.arange(length) >= (4 if number == 1 else 1)
        made.append(
            Sample(
                uid=f"row-{number}",
                number=0,
                prefix_ids=np.empty(0, np.int32),
                token_ids=rng.integers(0, 16, length).astype(np.int32),
                loss_mask=loss_mask,
                arrays={"loss_weights": 1.0, "temperature": 1.0},
            )
        )
    return made


@pytest.fixture(scope="module")
def logprobs(model_dir, samples):
    """Each sample's log-probabilities of its loss tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
        with torch.no_grad():
            all_logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        found.append(all_logprobs[torch.tensor(sample.loss_mask[1:])].numpy())
    return found


class Reports:
    def __init__(self):
        self.seen = []

    def report_evaluation(self, step, name, metrics):
        self.seen.append((step, name, metrics))


def test_a_set_in_parts_has_the_loss_and_perplexity_of_all_its_tokens(backend, samples, logprobs):
    reports = Reports()
    evaluate = Evaluator(backend, CrossEntropy(), reports)
    for step in (7, 9):  # the second set starts from nothing
        for (batch,) in evaluation_parts(samples, SETTINGS):
            assert len(reports.seen) == (step == 9)
            evaluate(EvaluateWork(name="held", batch=dataclasses.replace(batch, step=step)))
    loss = -np.concatenate(logprobs).mean()
    assert [(step, name) for step, name, _ in reports.seen] == [(7, "held"), (9, "held")]
    for _, _, metrics in reports.seen:
        assert metrics == {
            "loss": pytest.approx(loss, abs=1e-5),
            "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
            "loss_tokens": 4 + 4 + 2,
        }
    assert all(parameter.grad is None for parameter in backend.policy.module.parameters())


def test_scores_come_back_sample_by_sample(backend, samples, logprobs):
    parts = evaluation_parts(samples, SETTINGS)
    found = [score for (batch,) in parts for score in score_samples(backend, batch, "policy")]
    for score, expected in zip(found, logprobs, strict=True):
        np.testing.assert_allclose(score, expected, atol=1e-5)


def test_a_model_that_was_freed_is_gone_and_the_policy_cannot_be(model_dir):
    held = Backend(backend_config(model_dir, reference_dir=model_dir), SingleProcess(device=torch.device("cpu")))
    held.free("reference")
    with pytest.raises(ValueError, match="without the reference model"):
        held.score([], "reference")
    with pytest.raises(ValueError, match="the policy model is trained"):
        held.free("policy")
