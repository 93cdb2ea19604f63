"""Test later updates of a batch on a trainer: what they use of the first one, with a plain torch backend."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.work import RepeatWork
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.train_step import TrainStep
from tests.unit.consumer.test_train_step import ScriptedBackend, batch, seen, step_of


class Backend(ScriptedBackend):
    """With a teacher."""

    def score(self, micro_batches: Sequence[MicroBatch], model: str = "policy", output: str = "scores") -> list[Tensor]:
        if output != "hidden":
            return super().score(micro_batches, model)
        self.calls.append(f"score hidden {model}")
        return [torch.zeros(*m.token_ids.shape, 4) for m in micro_batches] if self.has_head else []


def again(step: int, *, first: int, is_last: bool = False, progress: float = 0.0) -> RepeatWork:
    return RepeatWork(step=step, first_step=first, is_last=is_last, learning_rate_progress=progress)


def test_later_updates_train_the_batch_with_the_scores_of_the_policy_before_the_first() -> None:
    backend = Backend()
    train_step = step_of(backend, old_policy_period=3, updates_per_batch=3, has_reference=True)
    metrics = [
        train_step.run(batch(0)),
        train_step.repeat(again(1, first=0)),
        train_step.repeat(again(2, first=0, is_last=True)),
        train_step.run(batch(3)),
    ]
    assert backend.calls == [
        *("score policy", "score reference", "train"),
        *("train", "train"),
        *("score policy", "score reference", "train"),
    ]
    assert seen(backend, "old_logprobs") == [pytest.approx([value] * 3) for value in (-2.0, -2.0, -2.0, -2.3)]
    assert [mini_batch.step for mini_batch in backend.trained] == [0, 1, 2, 3]
    assert {frozenset(each) for each in metrics} == {frozenset(metrics[0])}
    with pytest.raises(KeyError):
        train_step.repeat(again(3, first=0))  # not kept any longer


def test_with_several_batches_a_sync_later_updates_follow_all_first_ones_and_the_old_policy_is_the_syncs() -> None:
    backend = Backend()
    train_step = step_of(backend, old_policy_period=4, updates_per_batch=2)
    for first in (0, 4):
        for step in (first, first + 1):
            train_step.run(batch(step))
        for step in (first, first + 1):
            train_step.repeat(again(step + 2, first=step, is_last=True))
    assert backend.calls == ["keep", "score old", "train", "score old", "train", "train", "train"] * 2
    assert seen(backend, "old_logprobs") == [pytest.approx([value] * 3) for value in [-2.0] * 4 + [-2.4] * 4]


def test_a_later_update_has_the_scale_of_its_batch_and_the_rate_of_its_own_step() -> None:
    backend = Backend()
    train_step = step_of(backend, updates_per_batch=2)
    train_step.run(batch(is_last=False, loss_scale=1.0))
    train_step.run(batch(loss_scale=0.25))
    train_step.repeat(again(1, first=0, is_last=True, progress=0.5))
    assert backend.steps == [(0.25, pytest.approx(0.1)), (0.25, pytest.approx(0.1 * (0.1 + 0.9 / 2)))]
    assert [mini_batch.is_last for mini_batch in backend.trained] == [False, True] * 2


def test_later_updates_have_the_advantages_of_the_first_and_report_what_they_came_from() -> None:
    backend = Backend()
    settings = {"has_reference": True, "reward_kl_coeff": 0.1, "kl_estimator": "k1", "whitens": True}
    train_step = step_of(backend, updates_per_batch=2, **settings)
    train_step.run(batch(advantage=3.0, is_last=False))
    first = train_step.run(batch(advantage=1.0))
    later = train_step.repeat(again(1, first=0, is_last=True))
    assert backend.calls == ["score reference"] * 2 + ["train"] * 4
    assert seen(backend, "advantages")[:2] == seen(backend, "advantages")[2:]
    assert later["kl_mean"] == first["kl_mean"] == 3.0 / 4.0


def test_a_step_that_is_not_completed_leaves_nothing_in_a_later_update() -> None:
    backend = Backend()
    train_step = step_of(backend, updates_per_batch=2)
    train_step.run(batch(0))
    train_step.run(batch(1, is_last=False))
    metrics = train_step.repeat(again(1, first=0, is_last=True))
    assert backend.calls == ["train", "train", "forget", "train"]
    assert metrics["loss"] == 2.0 * 0.25, "of one mini-batch"


def test_hidden_states_are_not_kept_but_computed_for_each_update() -> None:
    loss = DistilledLoss(loss=PolicyLoss(), direction="reverse", kl_coeff=1.0)
    backend = Backend()
    train_step = TrainStep(
        backend, PolicyGradient(loss=loss, updates_per_batch=2), learning_rate=LearningRate(peak=0.1)
    )
    train_step.run(batch())
    assert all("teacher_hidden" not in m.loss_arrays for kept in train_step._kept.values() for m in
               kept.batches[0].micro_batches)  # fmt: skip
    train_step.repeat(again(1, first=0, is_last=True))
    assert backend.calls == ["score hidden teacher", "train"] * 2
    assert all("teacher_hidden" in b.micro_batches[0].loss_arrays for b in backend.trained)
