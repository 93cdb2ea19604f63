"""Test which tokens are measured, with which weights, and how much of a step; by a backend of one number."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.config import Config
from consumer.logprob_mismatch import MismatchMeter, sampling_gap
from consumer.models.weight_history import WeightHistory
from tests.unit.consumer.conftest import make_micro_batch


class OneWeight:
    """Gives every token minus its weight; the weight of version N is N + 1."""

    def __init__(self, *, has_head: bool = True, is_needed_elsewhere: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.has_head = has_head
        self.is_needed_elsewhere = is_needed_elsewhere
        self.calls: list[tuple[float, int]] = []  # weight, micro-batches

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        self.calls.append((self.weight.item(), len(micro_batches)))
        scores = [torch.full(m.token_ids.shape, -self.weight.item()) for m in micro_batches]
        return scores if self.has_head else []

    def any_rank(self, is_needed: bool) -> bool:
        return is_needed or self.is_needed_elsewhere

    def step(self) -> None:
        with torch.no_grad():
            self.weight += 1


def meter(backend: OneWeight, *, num_versions: int = 8, num_tokens: int = 1000, sync_period: int = 1) -> MismatchMeter:
    history = WeightHistory([backend.weight], max_versions=num_versions)
    return MismatchMeter(backend, history, num_tokens=num_tokens, sync_period=sync_period)


def sampled_by(*versions: int, error: float = 0.0) -> MicroBatch:
    """One sample with a prompt token; its response has a token of each version, whose engine is off by `error`."""
    micro_batch = make_micro_batch(([1] * (1 + len(versions)), 1))
    arrays = micro_batch.loss_arrays
    places = arrays["loss_mask"]
    policy_version, logprobs = np.zeros_like(arrays["policy_version"]), np.zeros_like(arrays["rollout_logprobs"])
    policy_version[places] = versions
    logprobs[places] = [-(version + 1.0) - error for version in versions]
    return micro_batch.with_arrays(policy_version=policy_version, rollout_logprobs=logprobs)


def take_steps(gap: MismatchMeter, backend: OneWeight, number: int, *, first: int = 0) -> None:
    for step in range(first, first + number):
        gap.end_step(step)
        backend.step()


def numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def test_each_token_is_measured_with_the_weights_that_sampled_it_and_the_trainers_own_are_left_to_the_loss() -> None:
    backend = OneWeight()
    gap = meter(backend)
    take_steps(gap, backend, 3)
    sums = gap.measure([sampled_by(0, 1, 3), sampled_by(1, 2, 2, error=0.5)], step=3)
    assert numbers(sums) == {"gap_tokens": 5, "gap_sum": pytest.approx(1.5), "gap_max": pytest.approx(0.5)}
    assert backend.calls == [(1.0, 1), (2.0, 2), (3.0, 1)]
    assert backend.weight.item() == 4.0


def test_what_the_trainers_own_weights_sampled_costs_nothing() -> None:
    backend = OneWeight()
    gap = meter(backend)
    take_steps(gap, backend, 1)
    assert gap.measure([sampled_by(1, 1)], step=1) == {}
    assert backend.calls == []


def test_tokens_of_weights_that_are_not_kept_are_not_measured() -> None:
    backend = OneWeight()
    gap = meter(backend, num_versions=1)
    take_steps(gap, backend, 2)
    assert numbers(gap.measure([sampled_by(0, 1, 7)], step=2))["gap_tokens"] == 1
    assert meter(OneWeight(), num_versions=0).measure([sampled_by(0)], step=2) == {}


def test_whole_micro_batches_are_measured_until_a_step_has_enough_tokens() -> None:
    backend = OneWeight()
    gap = meter(backend, num_tokens=3)
    take_steps(gap, backend, 1)
    assert gap.measure([sampled_by(1)], step=1) == {}, "nothing to measure in the first mini-batch"
    assert numbers(gap.measure([sampled_by(0, 0), sampled_by(0, 0), sampled_by(0)], step=1))["gap_tokens"] == 4
    assert gap.measure([sampled_by(0)], step=1) == {}
    take_steps(gap, backend, 1, first=1)
    assert numbers(gap.measure([sampled_by(0)], step=2))["gap_tokens"] == 1, "each step anew"


def test_of_several_steps_per_sync_the_first_ones_weights_are_kept_and_a_resumes_checkpoint() -> None:
    for first, expected in ((0, [0, 3]), (4, [4, 6])):
        backend = OneWeight()
        gap = meter(backend, sync_period=3)
        take_steps(gap, backend, 4, first=first)
        assert sorted(gap._history.versions) == expected


def test_a_rank_without_the_lm_head_takes_part_and_reports_nothing() -> None:
    backend = OneWeight(has_head=False)
    gap = meter(backend)
    take_steps(gap, backend, 1)
    assert gap.measure([sampled_by(0)], step=1) == {}
    assert backend.calls == [(1.0, 1)]


def test_a_rank_without_tokens_of_a_version_scores_with_those_that_hold_the_weights_with_it() -> None:
    backend = OneWeight(is_needed_elsewhere=True)
    gap = meter(backend)
    take_steps(gap, backend, 2)
    assert gap.measure([sampled_by(2)], step=2) == {}
    assert backend.calls == [(1.0, 0), (2.0, 0)]  # of no micro-batch of its own


@pytest.mark.parametrize(
    ("flags", "is_first_copy", "expected"),
    [
        ({}, True, 0),  # K = 1: the trainers' own weights are those of the last sync
        ({"n_behind": 2}, True, 2),
        ({"n_behind": 2}, False, 0),  # one copy measures for all
        ({"train_batch_size": 4}, True, 1),  # K = 2
        ({"train_batch_size": 4, "n_behind": 1}, True, 2),
        ({"n_behind": 1, "logprob_gap_tokens": 0}, True, 0),
    ],
)
def test_a_run_keeps_as_many_versions_as_may_have_sampled(
    flags: dict[str, int], is_first_copy: bool, expected: int
) -> None:
    sizes = {"num_inferencer": 1, "num_trainers": 1, "inference_batch_size": 8, "train_batch_size": 8}
    place = SimpleNamespace(is_first_copy=is_first_copy)
    backend = SimpleNamespace(layout=place, live_weights=lambda: [torch.zeros(1)])
    gap = sampling_gap(backend, Config(**{**sizes, **flags}))
    for step in range(8):
        gap.end_step(step)
    assert len(gap._history.versions) == expected
