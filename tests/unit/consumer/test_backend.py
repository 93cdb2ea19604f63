"""Test the backend's contract in one process: sums, scaling, reports and refusals."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.errors import ConfigError, EngineError
from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch

SAMPLES = [([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1), ([3, 1, 4, 1, 5, 9], 3)]
LOSS = PolicyLoss()


@dataclasses.dataclass(frozen=True)
class Unseparated:
    """The same loss, which does not say that it may be evaluated token by token."""

    loss: PolicyLoss
    is_token_separable: ClassVar[bool] = False

    def is_final(self, sums: object) -> bool:
        raise AssertionError("asked only after an evaluation by tokens")

    def __call__(self, *arguments: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.loss(*arguments)


def make_backend(model_dir: Path, **settings: object) -> Backend:
    config = backend_config(model_dir, **settings)
    return Backend(config, SingleProcess(device=torch.device("cpu")))


def mini_batch(*micro_batches: MicroBatch, step: int = 0, is_last: bool = True) -> MiniBatch:
    return MiniBatch(
        step=step, micro_batches=micro_batches, is_last=is_last, loss_scale=1.0, learning_rate_progress=0.0
    )


def gradient(backend: Backend) -> torch.Tensor:
    backend.reduce_gradients()
    return torch.cat([gradient.flatten() for gradient in backend.policy.gradients.values()])


def train(backend: Backend, *, learning_rate: float = 1e-2) -> None:
    backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    backend.optimizer_step(loss_scale=1 / 3, learning_rate=learning_rate)


def test_no_gradient_stays_after_a_step_in_bfloat16_not_of_the_masters_either(model_dir: Path) -> None:
    backend = make_backend(model_dir, precision="bf16")
    before = exported(backend)
    train(backend)
    assert any((weight != before[name]).any() for name, weight in exported(backend).items())
    masters = backend.policy.masters()
    assert all(master.dtype == torch.float32 and master.grad is None for master in masters.values())
    assert all(parameter.grad is None for parameter in backend.policy.module.parameters())


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in backend.export_weights()}


def test_gradients_add_up_over_micro_batches_and_mini_batches(model_dir: Path) -> None:
    whole, parts = make_backend(model_dir), make_backend(model_dir)
    sums = whole.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    first = parts.forward_backward(
        mini_batch(make_micro_batch(SAMPLES[0]), make_micro_batch(SAMPLES[1]), is_last=False), LOSS
    )
    last = parts.forward_backward(mini_batch(make_micro_batch(SAMPLES[2])), LOSS)
    assert (gradient(whole) - gradient(parts)).norm() / gradient(whole).norm() < 1e-5
    assert sums["num_tokens"] == 9
    assert first["num_tokens"] + last["num_tokens"] == 9
    assert (first["loss_sum"] + last["loss_sum"]).item() == pytest.approx(sums["loss_sum"].item(), rel=1e-6)
    assert sums["ratio_max"] == pytest.approx(max(first["ratio_max"], last["ratio_max"]))


def test_a_last_mini_batch_without_samples_reports_zeros_and_has_a_gradient_of_zero(model_dir: Path) -> None:
    backend = make_backend(model_dir, reference_dir=model_dir)
    sums = backend.forward_backward(mini_batch(), PolicyLoss(kl_coeff=0.1))
    assert set(sums) >= {"num_tokens", "kl_sum", "gap_tokens"}
    assert all(value.item() == 0 for value in sums.values())
    assert not gradient(backend).any()


def test_a_mini_batch_without_samples_that_is_not_the_last_does_nothing(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    assert backend.forward_backward(mini_batch(is_last=False), LOSS) == {}
    assert backend.policy.gradients == {}
    assert all(p.grad is None for p in backend.policy.module.parameters())


def test_a_step_of_scale_0_clears_the_gradient_of_a_step_that_is_not_complete(model_dir: Path) -> None:
    backend, other = make_backend(model_dir), make_backend(model_dir)
    backend.forward_backward(mini_batch(make_micro_batch(SAMPLES[0]), is_last=False), LOSS)
    assert backend.optimizer_step(loss_scale=0.0, learning_rate=1.0) == 0.0
    for each in (backend, other):
        each.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    assert torch.equal(gradient(backend), gradient(other))


def test_a_loss_evaluated_in_chunks_of_tokens_has_the_gradient_and_sums_of_one_that_sees_all(model_dir: Path) -> None:
    fused, whole = make_backend(model_dir, reference_dir=model_dir), make_backend(model_dir)
    micro_batch = make_micro_batch(*SAMPLES)
    (reference,) = fused.score([micro_batch], "reference")
    scored = micro_batch.with_arrays(ref_logprobs=reference.numpy() - 0.1)
    loss = PolicyLoss(kl_coeff=0.1)
    sums = fused.forward_backward(mini_batch(scored), loss)
    expected = whole.forward_backward(mini_batch(scored), Unseparated(loss))
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        assert sums[name].item() == pytest.approx(value.item(), rel=1e-5), name
    assert (gradient(fused) - gradient(whole)).norm() / gradient(whole).norm() < 1e-6


def test_a_step_forgets_its_gradient_and_uses_the_rate_it_is_given(model_dir: Path) -> None:
    backend = make_backend(model_dir, optimizer=OptimizerConfig(weight_decay=0.0))
    before = backend.policy.module.get_parameter("model.norm.weight").detach().clone()
    for learning_rate in (0.0, 1e-2):
        backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
        assert backend.optimizer_step(loss_scale=1 / 3, learning_rate=learning_rate) > 0
        assert all(p.grad is None for p in backend.policy.module.parameters())
        moved = (backend.policy.module.get_parameter("model.norm.weight") - before).abs().max().item()
        assert moved == pytest.approx(learning_rate, rel=1e-3)  # AdamW's first steps are of the rate's size


def test_the_norm_is_that_of_the_scaled_gradient(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    expected = gradient(backend).norm().item() / 3
    assert backend.optimizer_step(loss_scale=1 / 3, learning_rate=0.0) == pytest.approx(expected, rel=1e-5)


def test_scores_are_the_losss_own_log_probabilities_and_leave_no_gradient(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    seen = []

    def record(logprobs: torch.Tensor, entropy: torch.Tensor, tensors: dict) -> tuple[torch.Tensor, dict]:
        seen.append((logprobs.detach(), entropy, tensors["trainer_version"].item()))
        return logprobs.sum(), {}

    micro_batch = make_micro_batch(*SAMPLES)
    backend.forward_backward(mini_batch(micro_batch, step=7), record)
    (scores,) = backend.score([micro_batch])
    assert torch.equal(scores, seen[0][0])
    assert not scores.requires_grad
    assert (seen[0][1][torch.tensor(micro_batch.loss_arrays["loss_mask"])] > 0).all()
    assert seen[0][2] == 7


def test_each_micro_batch_is_scored_in_its_own_shape(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    micro_batches = [make_micro_batch(*SAMPLES[:2]), make_micro_batch(SAMPLES[2])]
    assert [score.shape for score in backend.score(micro_batches)] == [(1, 9), (1, 6)]
    assert backend.score([]) == []


def test_the_reference_is_another_model_that_does_not_train(model_dir: Path, save_model: Callable[..., Path]) -> None:
    other = save_model(tie_word_embeddings=False, num_hidden_layers=1)
    backend = make_backend(model_dir, reference_dir=other)
    micro_batch = make_micro_batch(*SAMPLES)
    (expected,) = make_backend(other).score([micro_batch])
    for _ in range(2):
        (score,) = backend.score([micro_batch], "reference")
        assert torch.equal(score, expected)
        train(backend)
    with pytest.raises(ValueError, match="without the reference model"):
        make_backend(model_dir).score([micro_batch], "reference")


def test_a_gradient_that_is_not_finite_stops_the_run_before_any_weight_moves(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    before = exported(backend)
    micro_batch = make_micro_batch(*SAMPLES)
    infinite = np.where(micro_batch.loss_arrays["loss_mask"], np.float32(np.inf), np.float32(0))
    poisoned = micro_batch.with_arrays(advantages=infinite)
    backend.forward_backward(mini_batch(poisoned), LOSS)
    with pytest.raises(EngineError, match="the gradient norm is nan"):
        backend.optimizer_step(loss_scale=1.0, learning_rate=1e-3)
    assert all(torch.equal(before[name], weight) for name, weight in backend.export_weights())


def test_bfloat16_steps_on_float32_masters_that_its_weights_are_rounded_from(model_dir: Path) -> None:
    backend = make_backend(model_dir, precision="bf16", optimizer=OptimizerConfig(weight_decay=0.0))
    start = {name: p.detach().float() for name, p in backend.policy.module.named_parameters()}
    for _ in range(3):
        train(backend, learning_rate=1e-5)
    norm = backend.policy.module.get_parameter("model.norm.weight")  # of ones, beside which bfloat16 has steps of 1/256
    assert torch.equal(norm.float(), start["model.norm.weight"])
    for name, master in backend.policy.masters().items():
        assert master.dtype == torch.float32
        # The same direction three times: each of AdamW's steps is of the rate's size.
        assert (master - start[name]).abs().max().item() == pytest.approx(3e-5, rel=0.05)
        assert torch.equal(backend.policy.module.get_parameter(name), master.bfloat16())


def test_gradients_of_a_bfloat16_model_add_up_in_float32(model_dir: Path) -> None:
    once, often, count = make_backend(model_dir, precision="bf16"), make_backend(model_dir, precision="bf16"), 40
    micro_batch = make_micro_batch(*SAMPLES)
    once.forward_backward(mini_batch(micro_batch), LOSS)
    often.forward_backward(mini_batch(*[micro_batch] * count), LOSS)
    often.reduce_gradients()
    assert {each.dtype for each in often.policy.gradients.values()} == {torch.float32}
    assert {p.dtype for p in often.policy.module.parameters()} == {torch.bfloat16}
    exact = count * gradient(once)
    assert (gradient(often) - exact).norm() / exact.norm() < 1e-6
    in_bfloat16, added = torch.zeros_like(exact, dtype=torch.bfloat16), gradient(once).bfloat16()
    for _ in range(count):
        in_bfloat16 += added
    assert (in_bfloat16.float() - exact).norm() / exact.norm() > 0.01  # what this guards against


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_are_every_tensor_once_in_the_state_dicts_order(
    save_model: Callable[..., Path], tied: bool
) -> None:
    backend = make_backend(save_model(tie_word_embeddings=tied))
    state = backend.policy.module.state_dict()
    # A tied head is left out; an untied one is sent even where it equals the embedding.
    if not tied:
        with torch.no_grad():
            backend.policy.module.lm_head.weight.copy_(backend.policy.module.model.embed_tokens.weight)
    weights = exported(backend)
    assert list(weights) == [name for name in state if name != "lm_head.weight" or not tied]
    assert all(torch.equal(weights[name], state[name]) for name in weights)


@pytest.mark.parametrize(("precision", "wire_dtype"), [("fp32", torch.bfloat16), ("bf16", torch.float32)])
def test_exported_weights_are_cast_to_the_wire_and_carry_no_gradient(
    model_dir: Path, precision: str, wire_dtype: torch.dtype
) -> None:
    backend = make_backend(model_dir, precision=precision, wire_dtype=wire_dtype)
    for name, weight in backend.export_weights():
        assert weight.dtype == wire_dtype
        assert not weight.requires_grad
        assert torch.equal(weight, backend.policy.module.get_parameter(name).to(wire_dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("saved", ["fp32", "bf16"])
@pytest.mark.parametrize("resumed", ["fp32", "bf16"])
def test_a_checkpoint_resumes_in_either_precision_from_the_same_masters(
    model_dir: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    backend = make_backend(model_dir, precision=saved)
    train(backend)
    backend.save(tmp_path / "step-1", state={"step": 1})
    masters = {name: master.detach().clone() for name, master in backend.policy.masters().items()}
    other = make_backend(tmp_path / "step-1", precision=resumed)
    other.restore(tmp_path / "step-1")
    assert all(torch.equal(other.policy.masters()[name], master) for name, master in masters.items())
    for each in (backend, other):
        train(each)
    if saved == resumed:
        pairs = zip(exported(backend).values(), exported(other).values(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_a_resumed_backend_draws_the_random_numbers_that_the_saved_one_would_have_drawn(
    model_dir: Path, tmp_path: Path
) -> None:
    backend = make_backend(model_dir)
    train(backend)
    torch.manual_seed(3)
    backend.save(tmp_path / "step-1", state={})
    expected = torch.rand(4)
    resumed = make_backend(tmp_path / "step-1")
    torch.manual_seed(4)
    resumed.restore(tmp_path / "step-1")
    assert torch.equal(torch.rand(4), expected)


def test_the_optimizer_of_another_model_is_refused(
    model_dir: Path, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    backend = make_backend(model_dir)
    train(backend)
    backend.save(tmp_path / "step-1", state={})
    with pytest.raises(ConfigError, match=r"another model: it has no model\.layers\.2\."):
        make_backend(save_model(num_hidden_layers=3)).restore(tmp_path / "step-1")
