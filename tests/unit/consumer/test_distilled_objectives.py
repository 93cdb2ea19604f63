"""Test the objectives with a teacher: models they need, what they score, loss and metrics; on plain torch backends."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coati_rl.batch import MiniBatch
from coati_rl.config.cli import parse
from consumer.backend import Backend
from consumer.objectives.forward_kl import ForwardKL
from consumer.objectives.objective import Objective
from consumer.objectives.run_objective import policy_gradient
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch

SAMPLES = (([1, 2, 3, 4, 5], 2), ([7, 8, 9, 10], 1))
NUM_TOKENS = 6  # of the responses


@pytest.fixture(scope="module")
def teacher_dir(save_model) -> Path:
    """A Llama of another width and depth."""
    return save_model("llama", hidden_size=24, head_dim=12, num_hidden_layers=3, tie_word_embeddings=False)


@pytest.fixture
def backend(model_dir: Path, teacher_dir: Path) -> Backend:
    config = backend_config(model_dir, teacher_dir=teacher_dir)
    return Backend(config, SingleProcess(device=torch.device("cpu")))


def batch_of(*samples, is_last: bool = True) -> MiniBatch:
    return MiniBatch(
        step=0,
        micro_batches=(make_micro_batch(*samples),),
        is_last=is_last,
        loss_scale=1 / NUM_TOKENS,
        learning_rate_progress=0.0,
    )


def objective_of(flags: str) -> Objective:
    return policy_gradient(parse(["-kl", "0", "--skip-threshold", "None", *flags.split()])[0])


def log_softmax(directory: Path) -> torch.Tensor:
    """float32[N, V] at the places of the responses' tokens, by plain transformers, one sample alone."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    rows = [model(torch.tensor([ids])).logits[0, prompt - 1 : -1] for ids, prompt in SAMPLES]
    return torch.log_softmax(torch.cat(rows), dim=-1).detach()


def chosen(logprobs: torch.Tensor) -> torch.Tensor:
    targets = [token for ids, prompt in SAMPLES for token in ids[prompt:]]
    return logprobs[torch.arange(len(targets)), torch.tensor(targets)]


@pytest.mark.parametrize(
    ("flags", "scores", "hidden"),
    [
        ("", {}, {}),
        ("--teacher big", {"teacher_logprobs": "teacher"}, {}),
        ("--teacher big --distill-kl full", {}, {"teacher_hidden": "teacher"}),
    ],
)
def test_the_teacher_is_loaded_and_scored_only_where_it_is_read(flags: str, scores: dict, hidden: dict) -> None:
    objective = objective_of(flags)
    assert (dict(objective.scores), dict(objective.hidden_states)) == (scores, hidden)
    assert objective.roles == ({"policy", "teacher"} if flags else {"policy"})


@pytest.mark.parametrize(("flags", "kept"), [("", 1.0), ("--distill-only", 0.0)])
def test_token_advantages_are_the_rewards_or_none_plus_the_teachers_part(
    backend: Backend, teacher_dir: Path, flags: str, kept: float
) -> None:
    objective = objective_of(f"--teacher big --distill-coeff 0.5 {flags}")
    (micro_batch,) = batch_of(*SAMPLES).micro_batches
    (score,) = backend.score([micro_batch], "teacher")
    (done,), sums = objective.targets((micro_batch.with_arrays(teacher_logprobs=score.numpy()),))
    mask = done.loss_arrays["loss_mask"]
    its = chosen(log_softmax(teacher_dir)).numpy()  # rollout log-probabilities are -4, advantages 1
    np.testing.assert_allclose(done.loss_arrays["advantages"][mask], kept + 0.5 * (its + 4), rtol=1e-5)
    assert sums["teacher_kl_sum"].item() == pytest.approx(float((-4 - its).sum()), rel=1e-5)


def test_the_full_divergence_is_reported_and_added_to_the_loss(
    backend: Backend, model_dir: Path, teacher_dir: Path
) -> None:
    p, q = log_softmax(model_dir), log_softmax(teacher_dir)
    kl = float((p.exp() * (p - q)).sum())
    plain = TrainStep(backend, objective_of("--distill-kl token"), learning_rate=LearningRate(peak=0.0)).run(
        batch_of(*SAMPLES)
    )
    full = objective_of("--teacher big --distill-kl full --distill-coeff 0.5")
    metrics = TrainStep(backend, full, learning_rate=LearningRate(peak=0.0)).run(batch_of(*SAMPLES))
    assert metrics["teacher_kl_mean"] == pytest.approx(kl / NUM_TOKENS, rel=1e-5)
    assert metrics["loss"] == pytest.approx(plain["loss"] + 0.5 * kl / NUM_TOKENS, rel=1e-5)
    alone = objective_of("--teacher big --distill-kl full --distill-coeff 0.5 --distill-only")
    metrics = TrainStep(backend, alone, learning_rate=LearningRate(peak=0.0)).run(batch_of(*SAMPLES))
    assert metrics["loss"] == pytest.approx(0.5 * kl / NUM_TOKENS, rel=1e-5)
    assert metrics["grad_norm"] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kl_weight", [0.25, 1.0])
def test_forward_kl_mixes_with_cross_entropy_and_reports_both(
    backend: Backend, model_dir: Path, teacher_dir: Path, kl_weight: float
) -> None:
    p, q = log_softmax(model_dir), log_softmax(teacher_dir)
    kl, nll = float((q.exp() * (q - p)).sum()) / NUM_TOKENS, -float(chosen(p).mean())
    objective = ForwardKL(kl_weight=kl_weight)
    metrics = TrainStep(backend, objective, learning_rate=LearningRate(peak=0.0)).run(batch_of(*SAMPLES))
    assert objective.roles == {"policy", "teacher"}
    assert metrics["teacher_kl_mean"] == pytest.approx(kl, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(nll), rel=1e-5)
    assert metrics["loss"] == pytest.approx(kl_weight * kl + (1 - kl_weight) * nll, rel=1e-5)
    assert metrics["loss_tokens"] == NUM_TOKENS


@pytest.mark.full
def test_forward_kl_brings_the_student_to_its_teacher_on_the_teachers_text(backend: Backend) -> None:
    step = TrainStep(backend, ForwardKL(), learning_rate=LearningRate(peak=3e-3))
    found = [step.run(batch_of(*SAMPLES))["teacher_kl_mean"] for _ in range(30)]
    assert found[-1] < 0.1 * found[0]


def test_a_mini_batch_of_no_tokens_is_trained_between_others(backend: Backend) -> None:
    step = TrainStep(backend, ForwardKL(), learning_rate=LearningRate(peak=0.0))
    whole = step.run(batch_of(*SAMPLES))
    assert step.run(batch_of(([1, 2], 2), is_last=False)) is None
    assert step.run(batch_of(*SAMPLES))["loss"] == whole["loss"]


def test_a_share_out_of_range_and_a_batch_without_hidden_states_are_refused(backend: Backend) -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"kl_weight = {share}"):
            ForwardKL(kl_weight=share)
    with pytest.raises(ValueError, match="needs teacher_hidden"):
        backend.forward_backward(batch_of(*SAMPLES), ForwardKL().losses["policy"])


def test_a_backend_without_a_teacher_names_it(model_dir: Path) -> None:
    alone = Backend(backend_config(model_dir), SingleProcess(device=torch.device("cpu")))
    with pytest.raises(ValueError, match="without the teacher model"):
        alone.forward_backward(batch_of(*SAMPLES), ForwardKL().losses["policy"])
