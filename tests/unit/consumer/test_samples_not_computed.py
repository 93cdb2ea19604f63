"""Test steps of which only the samples with a gradient are computed against steps that compute all of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.advantage import group_norm
from coati_rl.algorithms.aggregation import LossVariation
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch
from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import build_mini_batch
from coati_rl.batching.sample_selection import MIN_SAMPLES, SelectionSettings
from coati_rl.protocols import Role
from coati_rl.types import RolloutGroup
from coati_rl.work import RepeatWork
from consumer.backend import Backend
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
from tests.backends import backend_config
from tests.unit.groups import group_of

__all__ = ["group_of"]

# Samples of a group: reward and response tokens. A step has 8 groups of 4, half of which have an advantage.
VARIED = [(1.0, 5), (0.0, 12), (0.0, 30), (1.0, 9)]
RIGHT, WRONG = [(1.0, 7), (1.0, 20), (1.0, 11), (1.0, 3)], [(0.0, 25), (0.0, 4), (0.0, 8), (0.0, 16)]
HALF = [VARIED, RIGHT, VARIED, WRONG] * 2
NONE = [RIGHT, WRONG] * 4
FEW, ALL = SelectionSettings(min_tokens=0, seed=0), SelectionSettings(min_tokens=10**6, seed=0)

Groups = Sequence[RolloutGroup]


class RecordingBackend(Backend):
    """Keeps the gradient of each step, unscaled, and counts the samples that it scores and trains."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        super().__init__(backend_config(model_dir, **settings), SingleProcess(device=torch.device("cpu")))
        self.step_gradients: list[Tensor] = []
        self.num_scored, self.num_trained = 0, 0

    def score(
        self, micro_batches: Sequence[MicroBatch], model: Role = "policy", output: str = "scores"
    ) -> list[Tensor]:
        self.num_scored += sum(len(m.segments) for m in micro_batches)
        return super().score(micro_batches, model, output)

    def forward_backward(self, mini_batch: Any, loss_fn: Any, role: Role = "policy") -> dict[str, Tensor]:
        self.num_trained += sum(len(m.segments) for m in mini_batch.micro_batches)
        return super().forward_backward(mini_batch, loss_fn, role)

    def optimizer_step(self, **settings: Any) -> float:
        self.reduce_gradients()
        self.step_gradients.append(torch.cat([g.flatten() for g in self.policy.gradients.values()]).clone())
        return super().optimizer_step(**settings)

    def bits(self) -> dict[str, Tensor]:
        """Masters and the optimizer's state as integers, which tell 0.0 from -0.0."""
        found: dict[str, Tensor] = {}
        for name, master in self.policy.masters().items():
            state = self.policy.torch_optimizer.state[master]
            found |= {f"{kind}/{name}": value for kind, value in {"master": master.detach(), **state}.items()}
        return {key: value.clone().view(torch.int32) for key, value in found.items()}


class Run:
    """Train groups step by step with the parts of a real run: batcher, layout of micro-batches, train step."""

    def __init__(
        self,
        model_dir: Path,
        selection: SelectionSettings | None,
        *,
        loss: PolicyLoss | None = None,
        variation: LossVariation = "sample_level",
        precision: str = "fp32",
        mini_batch: int = 8,
        **objective: Any,
    ) -> None:
        self.backend = RecordingBackend(model_dir, precision=precision)
        self._settings = BatchSettings(
            dp=1,
            train_batch_size=8,
            train_minibatch_size=mini_batch,
            train_microbatch_size=64,
            loss_variation=variation,
            advantage_estimator="group_norm",
            rules=GroupRules(max_new_tokens=32),
            max_tokens_per_microbatch=128,
            selection=selection,
        )
        self.train_step = TrainStep(
            self.backend,
            PolicyGradient(loss=loss or PolicyLoss(), **objective),
            learning_rate=LearningRate(peak=1e-2),
        )
        self.num_computed: list[int] = []

    def step(self, groups: Groups, number: int = 0) -> dict[str, Any]:
        batcher = StepBatcher(self._settings, step=number, learning_rate_progress=0.0, estimator=group_norm)
        metrics, size = None, self._settings.prompts_per_mini_batch
        for first in range(0, len(groups), size):
            assert metrics is None
            metrics = self.train_step.run(build_mini_batch(batcher.add(groups[first : first + size])[0]))
        self.num_computed.append(batcher.close().num_computed)
        assert metrics is not None
        return metrics


@pytest.fixture
def groups_of(group_of: Callable[..., RolloutGroup]) -> Callable[..., Groups]:
    def make(specifications: Sequence[Any], *, step: int = 0) -> Groups:
        return [group_of(each, uid=f"p{i:02}", version=step) for i, each in enumerate(specifications)]

    return make


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "variation", "mini_batch"),
    [
        (PolicyLoss(), "sample_level", 8),
        (PolicyLoss(policy_loss="cispo"), "token_level", 2),
        (PolicyLoss(ratio_level="sequence"), "constant", 4),
    ],
)
def test_half_of_the_groups_have_no_advantage_and_the_gradient_is_that_of_computing_all(
    model_dir: Path, groups_of: Callable[..., Groups], loss: PolicyLoss, variation: LossVariation, mini_batch: int
) -> None:
    runs = [Run(model_dir, s, loss=loss, variation=variation, mini_batch=mini_batch) for s in (None, FEW)]
    (of_all, of_half) = (run.step(groups_of(HALF)) for run in runs)
    assert [run.num_computed for run in runs] == [[32], [16]]
    assert [run.backend.num_trained for run in runs] == [32, 16]
    expected, found = (run.backend.step_gradients[0] for run in runs)
    assert expected.norm() > 0 and (found - expected).norm() < 1e-5 * expected.norm()
    assert of_half["loss"] == pytest.approx(of_all["loss"], abs=1e-6), "the denominator counts all samples"
    assert of_half["grad_norm"] == pytest.approx(of_all["grad_norm"], rel=1e-5)
    assert of_half["logprob_gap_tokens"] == 4 * (5 + 12 + 30 + 9)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_samples_that_are_computed_for_the_metrics_alone_change_no_bit(
    model_dir: Path, groups_of: Callable[..., Groups], precision: str
) -> None:
    few, everything = (Run(model_dir, selection, precision=precision) for selection in (FEW, ALL))
    metrics = [run.step(groups_of(HALF)) for run in (few, everything)]
    assert (few.num_computed, everything.num_computed) == ([16], [32])
    assert torch.equal(few.backend.step_gradients[0], everything.backend.step_gradients[0])
    assert equal(few.backend.bits(), everything.backend.bits())
    assert metrics[0]["entropy_mean"] != metrics[1]["entropy_mean"], "the latter is over all tokens"
    assert metrics[1]["logprob_gap_tokens"] > metrics[0]["logprob_gap_tokens"]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_step_without_a_gradient_has_the_bits_of_one_that_computes_all_its_samples(
    model_dir: Path, groups_of: Callable[..., Groups], precision: str
) -> None:
    runs = [Run(model_dir, selection, precision=precision) for selection in (None, FEW)]
    for run in runs:
        run.step(groups_of([VARIED] * 8))  # after which Adam has moments
    before = [run.backend.bits() for run in runs]
    assert equal(*before)
    of_all, of_few = (run.step(groups_of(NONE, step=1), 1) for run in runs)
    assert [run.num_computed for run in runs] == [[32, 32], [32, MIN_SAMPLES]]
    after = [run.backend.bits() for run in runs]
    assert equal(*after) and not equal(before[0], after[0]), "moments decay and move the weights"
    assert of_all["grad_norm"] == of_few["grad_norm"] == of_all["loss"] == of_few["loss"] == 0
    assert of_few.keys() == of_all.keys()
    assert of_few["entropy_mean"] == pytest.approx(of_all["entropy_mean"], rel=0.2), "a sample of the same tokens"
    assert 0 < of_few["logprob_gap_tokens"] < of_all["logprob_gap_tokens"]
    assert of_few["logprob_gap_mean"] == pytest.approx(of_all["logprob_gap_mean"], rel=0.2)


def test_later_updates_and_the_old_policy_compute_the_same_samples_as_the_first(
    model_dir: Path, groups_of: Callable[..., Groups]
) -> None:
    settings = {"updates_per_batch": 2, "old_policy_period": 2}
    runs = [Run(model_dir, selection, **settings) for selection in (None, FEW)]
    again = RepeatWork(step=1, first_step=0, is_last=True, learning_rate_progress=0.0)
    for run in runs:
        run.step(groups_of(HALF))
        run.train_step.repeat(again)
    assert [run.backend.num_scored for run in runs] == [32, 16]
    assert [run.backend.num_trained for run in runs] == [64, 32]
    for expected, found in zip(*(run.backend.step_gradients for run in runs), strict=True):
        assert expected.norm() > 0 and (found - expected).norm() < 1e-5 * expected.norm()
