"""Test that gradients with a teacher are those of its full logits, for every objective, cut and trainer layout.

The teacher has another architecture, width and depth than the policy. The oracle runs plain transformers on one sample
at a time.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import save_model
from tests.integration.consumer.distillation_process import OBJECTIVES, aggregation_of, take_distillations
from tests.integration.consumer.gradient_matrix import RUNS, Run, Trial
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.samples import (
    Sample,
    chosen_logprobs,
    plain_model,
    sample_log_softmax,
    samples_near,
    scale_of,
)
from tests.integration.consumer.test_gradients import TOLERANCE, Trained, differences
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
MODELS = {"qwen3-tied": ("qwen3", True), "qwen2-untied": ("qwen2", False)}
TEACHER = "teacher"
CUTS = (Cut(2, True, "uneven", shared=True), Cut(4, False, "one"))
# Each layout in float32, those with ZeRO in bfloat16.
DUE = [run for run in RUNS if (run.precision == "bf16") == ("zero" in run.layout)]
DUE += [Run(layout, "fp32") for layout in ("cp2", "cp2_fsdp2_dp2", "cp2_tp2", "cp2_pp2")]
DUE += [Run(layout, "fp32") for layout in ("fsdp2_tp2_dp2", "fsdp2_dp2_copies2")]


def trials_of(run: Run) -> list[Trial]:
    """Every objective with both cuts, one on each model."""
    return [Trial(model, loss, how) for loss in OBJECTIVES for model, how in zip(MODELS, CUTS, strict=True)]


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (architecture, is_tied) in MODELS.items():
        save_model(root / name, architecture, tied=is_tied)
    save_model(root / TEACHER, "llama", tied=False, seed=5, hidden_size=48, head_dim=12, num_hidden_layers=3)
    return root


@pytest.fixture(scope="module")
def trained(
    trainers: TrainerServers,
    model_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Run], Trained]:
    """One launch of trainers for all runs of a size."""
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def launch(world_size: int) -> None:
        due = [(run, trials_of(run)) for run in DUE if run.world_size == world_size]
        trainers.launch_and_check(take_distillations, out_dir, model_root, due, TEACHER, world_size=world_size)

    def results(run: Run) -> Trained:
        launch(run.world_size)
        return Trained(model_root, run, trials_of(run), out_dir)

    return results


def terms_of(loss: str, sample: Sample, logprobs: Tensor, its: Tensor, *, has_teacher: bool) -> tuple[Tensor, float]:
    """float32[T] of what is minimised, from both models' float32[T, V], and the sum of the KL that is reported."""
    rollout, current = torch.tensor(sample.rollout_logprobs), chosen_logprobs(logprobs, sample)
    own, weight = logprobs.detach(), 1.0 if has_teacher else 0.0
    if "forward" in loss:
        share = weight * (0.75 if "mixed" in loss else 1.0)
        kl = (its.exp() * (its - logprobs)).sum(dim=-1)
        return share * kl - (1 - share) * current, float(kl.detach().sum())
    token_kl = rollout - chosen_logprobs(its, sample)
    advantage = torch.full_like(rollout, 0.0 if "alone" in loss else sample.advantage)
    if "token" in loss:
        advantage = advantage - weight * 0.5 * token_kl
    ratio = torch.exp(current - rollout)
    clipped = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    if "token" in loss:
        return clipped, float(token_kl.sum())
    kl = (logprobs.exp() * (logprobs - its)).sum(dim=-1)
    return clipped + weight * 10.0 * kl, float((own.exp() * (own - its)).sum())


def plain_gradients(
    model_dir: Path, loss: str, *, has_teacher: bool = True
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a step, and its reported loss and KL."""
    model, teacher = plain_model(model_dir), plain_model(model_dir.parent / TEACHER)
    samples, total = samples_near(model_dir, 0), {"loss_sum": 0.0, "teacher_kl_sum": 0.0}
    scale = scale_of(samples, aggregation_of(loss))
    for sample in samples:
        with torch.no_grad():
            its = sample_log_softmax(teacher, sample)
        terms, kl = terms_of(loss, sample, sample_log_softmax(model, sample), its, has_teacher=has_teacher)
        value = terms.sum() if aggregation_of(loss) == "token_level" else terms.mean()
        (scale * value).backward()
        total["loss_sum"] += value.item()
        total["teacher_kl_sum"] += kl
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients, total


def scales_of(gradients: dict[str, Tensor], precision: str) -> dict[str, float] | None:
    """In bfloat16 a key bias, whose terms nearly cancel, is measured by its layer's query bias."""
    if precision == "fp32":
        return None
    return {name: gradients[name.replace("k_proj.bias", "q_proj.bias")].norm().item() for name in gradients}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_the_teacher_acts_on_the_samples(model_root: Path, loss: str) -> None:
    """Without it the gradient is another one, by far more than the tolerance."""
    for model in MODELS:
        with_it, without_it = (
            plain_gradients(model_root / model, loss, has_teacher=has_teacher)[0] for has_teacher in (True, False)
        )
        if "alone" in loss:
            assert not any(gradient.any() for gradient in without_it.values())
        assert min(differences(without_it, with_it).values()) > 4 * TOLERANCE["bf16"]


@pytest.mark.full
@pytest.mark.parametrize("run", DUE, ids="-".join)
def test_every_cut_gives_the_plain_gradient_loss_and_kl(
    model_root: Path, trained: Callable[[Run], Trained], run: Run
) -> None:
    results = trained(run)
    last_stage = max(rank["place"][1] for rank in results.ranks)
    is_bf16 = run.precision == "bf16"
    for trial in trials_of(run):
        right, sums = plain_gradients(model_root / trial.model, trial.loss)
        joined = results.joined(trial, 0, "gradients")
        found = differences(joined, right, scales_of(right, run.precision))
        assert max(found.values()) < TOLERANCE[run.precision], (trial, found)
        for rank in results.ranks:
            record: dict[str, Any] = rank[trial][0]
            if rank["place"][1] < last_stage:
                assert record["sums"] == {}
                continue
            for name, value in sums.items():
                error = abs(record["sums"][name] - value) / max(abs(value), 1.0)
                assert error < (1e-2 if is_bf16 else 1e-5), (trial, name)
