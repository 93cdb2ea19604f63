"""Test which tokens are measured, with which weights, and how many per step, with a backend of one number."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.advantage import group_norm
from coati_rl.batch import MicroBatch
from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import build_mini_batch
from coati_rl.config import Config
from coati_rl.protocols import Role
from coati_rl.types import RolloutGroup
from consumer.backend import Backend
from consumer.logprob_mismatch import MismatchMeter, make_mismatch_meter
from consumer.models.weight_history import WeightHistory
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.groups import group_of

__all__ = ["group_of"]


class OneWeight:
    """Gives every token minus its weight; the weight of version N is N + 1."""

    def __init__(self, *, has_head: bool = True, is_needed_elsewhere: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.has_head = has_head
        self.is_needed_elsewhere = is_needed_elsewhere
        self.calls: list[tuple[float, int]] = []  # weight, micro-batches

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        self.calls.append((self.weight.item(), len(micro_batches)))
        scores = [torch.full(m.loss_arrays["token_ids"].shape, -self.weight.item()) for m in micro_batches]
        return scores if self.has_head else []

    def score_float32(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """A tenth above what `score` gives, for what is odd among the tokens' places, and below for the others."""
        tenths = [torch.tensor([[0.1, -0.1] * 8])[:, : m.loss_arrays["token_ids"].shape[1]] for m in micro_batches]
        return [score + tenth for score, tenth in zip(self.score(micro_batches), tenths, strict=False)]

    def any_rank(self, is_needed: bool) -> bool:
        return is_needed or self.is_needed_elsewhere

    def step(self) -> None:
        with torch.no_grad():
            self.weight += 1


def make_meter(
    backend: OneWeight,
    *,
    num_versions: int = 8,
    num_tokens: int = 1000,
    sync_period: int = 1,
    num_rounding_tokens: int | None = None,
) -> MismatchMeter:
    history = WeightHistory([backend.weight], max_versions=num_versions)
    return MismatchMeter(
        backend,
        history,
        num_tokens=num_tokens,
        sync_period=sync_period,
        num_rounding_tokens=num_rounding_tokens,
    )


def sampled_by(*versions: int, error: float = 0.0) -> MicroBatch:
    """One sample with a prompt token; its response has a token of each version, whose engine is off by `error`."""
    micro_batch = make_micro_batch(([1] * (1 + len(versions)), 1))
    arrays = micro_batch.loss_arrays
    sampled = arrays["loss_mask"]
    policy_version, logprobs = np.zeros_like(arrays["policy_version"]), np.zeros_like(arrays["rollout_logprobs"])
    policy_version[sampled] = versions
    logprobs[sampled] = [-(version + 1.0) - error for version in versions]
    return micro_batch.with_arrays(policy_version=policy_version, rollout_logprobs=logprobs)


def take_steps(meter: MismatchMeter, backend: OneWeight, number: int, *, first: int = 0) -> None:
    for step in range(first, first + number):
        meter.end_step(step)
        backend.step()


def numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def test_each_token_is_measured_with_the_weights_that_sampled_it_and_the_trainers_own_are_left_to_the_loss() -> None:
    backend = OneWeight()
    meter = make_meter(backend)
    take_steps(meter, backend, 3)
    sums = meter.measure([sampled_by(0, 1, 3), sampled_by(1, 2, 2, error=0.5)], step=3)
    assert numbers(sums) == {"gap_tokens": 5, "gap_sum": pytest.approx(1.5), "gap_max": pytest.approx(0.5)}
    assert backend.calls == [(1.0, 1), (2.0, 2), (3.0, 1)]
    assert backend.weight.item() == 4.0


def test_what_the_trainers_own_weights_sampled_costs_nothing() -> None:
    backend = OneWeight()
    meter = make_meter(backend)
    take_steps(meter, backend, 1)
    assert meter.measure([sampled_by(1, 1)], step=1) == {}
    assert backend.calls == []


def test_tokens_of_weights_that_are_not_kept_are_not_measured() -> None:
    backend = OneWeight()
    meter = make_meter(backend, num_versions=1)
    take_steps(meter, backend, 2)
    assert numbers(meter.measure([sampled_by(0, 1, 7)], step=2))["gap_tokens"] == 1
    assert make_meter(OneWeight(), num_versions=0).measure([sampled_by(0)], step=2) == {}


def test_a_step_measures_as_many_tokens_as_are_asked_for() -> None:
    backend = OneWeight()
    meter = make_meter(backend, num_tokens=3)
    take_steps(meter, backend, 1)
    assert meter.measure([sampled_by(1)], step=1) == {}, "nothing to measure in the first mini-batch"
    assert numbers(meter.measure([sampled_by(0, 0), sampled_by(0, 0), sampled_by(0)], step=1))["gap_tokens"] == 3
    assert meter.measure([sampled_by(0)], step=1) == {}
    take_steps(meter, backend, 1, first=1)
    assert numbers(meter.measure([sampled_by(0)], step=2))["gap_tokens"] == 1, "each step anew"


class RecordingBackend(Backend):
    """Keeps the micro-batches that it scored and their scores."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(backend_config(model_dir), SingleProcess(device=torch.device("cpu")))
        self.scored: list[tuple[MicroBatch, Tensor]] = []

    def score(
        self, micro_batches: Sequence[MicroBatch], model: Role = "policy", output: str = "scores"
    ) -> list[Tensor]:
        scores = super().score(micro_batches, model, output)
        self.scored += zip(micro_batches, scores, strict=True)
        return scores


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_tokens", [1, 10, 40, 70, 1000])
@pytest.mark.parametrize("layout", [{"shares_prefixes": True}, {}, {"one_sample_per_row": True}])
def test_tokens_of_a_part_of_a_micro_batch_have_the_scores_of_the_whole(
    model_dir: Path, group_of: Callable[..., RolloutGroup], layout: dict[str, bool], num_tokens: int
) -> None:
    # Two groups; the responses of each go on with each other's tokens: in a row that shares prefixes they are a tree.
    groups = [group_of([(1.0, 20), (0.0, 9), (1.0, 30)], uid=uid, version=0) for uid in ("p0", "p1")]
    settings = BatchSettings(
        dp=1,
        train_batch_size=2,
        train_minibatch_size=2,
        train_microbatch_size=6,
        loss_variation="sample_level",
        advantage_estimator="group_norm",
        rules=GroupRules(max_new_tokens=32),
        **layout,
    )
    batcher = StepBatcher(settings, step=1, learning_rate_progress=0.0, estimator=group_norm)
    (whole,) = build_mini_batch(batcher.add(groups)[0]).micro_batches
    places = np.arange(whole.token_ids.size, dtype=np.uint16).reshape(*whole.token_ids.shape, 1, 1)
    whole = dataclasses.replace(whole, routes=places)
    backend = RecordingBackend(model_dir)
    meter = MismatchMeter(
        backend, WeightHistory(backend.live_weights(), max_versions=1), num_tokens=num_tokens, sync_period=1
    )
    meter.end_step(0)
    sums = numbers(meter.measure([whole], step=1))
    ((part, found),) = backend.scored
    rows, columns = part.loss_arrays["token_ids"].shape
    (expected,) = backend.score([whole])
    torch.testing.assert_close(found, expected[:rows, :columns], rtol=0, atol=1e-5)
    assert sums["gap_tokens"] == int(part.loss_arrays["loss_mask"].sum()) >= min(num_tokens, 118)
    if rows == 1 < len(whole.token_ids) or len(whole.token_ids) == 1:
        assert sums["gap_tokens"] == min(num_tokens, 118)
    assert part.num_tokens < whole.num_tokens or num_tokens == 1000
    assert np.array_equal(part.routes, places[: len(part.token_ids), : part.token_ids.shape[1]])


def test_of_several_steps_per_sync_the_first_ones_weights_are_kept_and_a_resumes_checkpoint() -> None:
    for first, expected in ((0, [0, 3]), (4, [4, 6])):
        backend = OneWeight()
        meter = make_meter(backend, sync_period=3)
        take_steps(meter, backend, 4, first=first)
        assert sorted(meter._history.versions) == expected


def test_a_rank_without_the_lm_head_takes_part_and_reports_nothing() -> None:
    backend = OneWeight(has_head=False)
    meter = make_meter(backend)
    take_steps(meter, backend, 1)
    assert meter.measure([sampled_by(0)], step=1) == {}
    assert backend.calls == [(1.0, 1)]


def test_a_rank_without_tokens_of_a_version_scores_with_those_that_hold_the_weights_with_it() -> None:
    backend = OneWeight(is_needed_elsewhere=True)
    meter = make_meter(backend)
    take_steps(meter, backend, 2)
    assert meter.measure([sampled_by(2)], step=2) == {}
    assert backend.calls == [(1.0, 0), (2.0, 0)]  # of no micro-batch of its own


@pytest.mark.parametrize(
    ("flags", "has_first_samples", "expected"),
    [
        ({}, True, 0),  # K = 1: the trainers' own weights are those of the last sync
        ({"n_behind": 2}, True, 2),
        ({"n_behind": 2}, False, 0),  # dp_rank 0 measures for all
        ({"train_batch_size": 4}, True, 1),  # K = 2
        ({"train_batch_size": 4, "n_behind": 1}, True, 2),
        ({"n_behind": 1, "logprob_gap_tokens": 0}, True, 0),
    ],
)
def test_a_run_keeps_as_many_versions_as_may_have_sampled(
    flags: dict[str, int], has_first_samples: bool, expected: int
) -> None:
    sizes = {"num_inferencer": 1, "num_trainers": 1, "inference_batch_size": 8, "train_batch_size": 8}
    layout = SimpleNamespace(has_first_samples=has_first_samples)
    backend = SimpleNamespace(layout=layout, live_weights=lambda: [torch.zeros(1)], precision="fp32")
    meter = make_mismatch_meter(backend, Config(**{**sizes, **flags}))
    for step in range(8):
        meter.end_step(step)
    assert len(meter._history.versions) == expected


def test_in_bf16_tokens_of_every_version_are_scored_in_float32_too_with_the_weights_that_sampled_them() -> None:
    backend = OneWeight()
    meter = make_meter(backend, num_rounding_tokens=1000)
    take_steps(meter, backend, 1)
    # The engine is off by -0.5 on the first sample's tokens; the last token of it is of a version that nobody holds.
    sums = numbers(meter.measure([sampled_by(0, 1, 1, 7, error=0.5), sampled_by(1)], step=1))
    assert (sums["rounding_tokens"], sums["gap_tokens"]) == (4, 1)
    assert sums["rounding_sum"] == pytest.approx(0.4)
    assert sums["rounding_squares"] == pytest.approx(0.04)
    assert sums["rounding_shift"] == pytest.approx(-1.5)
    assert [weight for weight, _ in backend.calls] == [1.0, 1.0, 2.0, 2.0]
    assert backend.weight.item() == 2.0


def test_as_many_of_the_trainers_own_tokens_are_scored_in_float32_as_are_asked_for_per_step() -> None:
    backend = OneWeight()
    meter = make_meter(backend, num_rounding_tokens=3)
    first = meter.measure([sampled_by(0, 0)], step=0)
    second = meter.measure([sampled_by(0, 0), sampled_by(0, 0)], step=0)
    assert [numbers(each)["rounding_tokens"] for each in (first, second)] == [2, 1]
    meter.end_step(0)
    assert numbers(meter.measure([sampled_by(1, 1)], step=1))["rounding_tokens"] == 0


def test_after_the_first_tokens_a_thirty_second_of_all_is_scored_in_float32() -> None:
    backend, measured = OneWeight(), list[float]()
    meter = make_meter(backend, num_rounding_tokens=2, num_versions=1)
    for step in range(130):
        sums = meter.measure([sampled_by(step)], step=step)  # two tokens in its row, one of them sampled
        measured.append(numbers(sums)["rounding_tokens"])
        take_steps(meter, backend, 1, first=step)
    assert [step for step, number in enumerate(measured) if number] == [0, 1, 64, 96, 128]
    # Of earlier versions, too: with weights of the last step two of three tokens are its own.
    assert numbers(meter.measure([sampled_by(129)], step=130)).get("gap_tokens") == 1


def test_a_rank_that_leaves_rounding_to_another_reports_it_of_no_token_and_scores_nothing() -> None:
    backend = OneWeight()
    sums = numbers(make_meter(backend, num_rounding_tokens=0).measure([sampled_by(0)], step=0))
    assert sums == dict.fromkeys(("rounding_tokens", "rounding_sum", "rounding_squares", "rounding_shift"), 0.0)
    assert backend.calls == []


@pytest.mark.parametrize(
    ("precision", "flags", "has_first_samples", "expected"),
    [
        ("bf16", {}, True, 256),
        ("bf16", {"logprob_gap_tokens": 100}, True, 100),
        ("bf16", {}, False, 0),  # the same names on all ranks
        ("fp32", {}, True, None),
        ("bf16", {"max_logprob_gap": 0.1}, True, None),  # a limit that does not depend on it
        ("bf16", {"old_logprobs": "trainer"}, True, None),  # the gap of sampled tokens is not judged
    ],
)
def test_rounding_is_measured_where_a_limit_depends_on_it(
    precision: str, flags: dict[str, object], has_first_samples: bool, expected: int | None
) -> None:
    sizes = {"num_inferencer": 1, "num_trainers": 1, "inference_batch_size": 8, "train_batch_size": 8}
    layout = SimpleNamespace(has_first_samples=has_first_samples)
    backend = SimpleNamespace(layout=layout, live_weights=lambda: [torch.zeros(1)], precision=precision)
    assert make_mismatch_meter(backend, Config(**{**sizes, **flags}))._num_rounding_tokens == expected
