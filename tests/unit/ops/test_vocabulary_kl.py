"""Test the divergence from a teacher over the vocabulary: values from NumPy, gradients from full logits in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.ops.vocabulary_kl import vocabulary_kl_loss
from tests.unit.ops.lm_head import L, R, V, make_inputs, relative_error, shared_sources

DIRECTIONS = ("reverse", "forward")
G = 5  # hidden size of the teacher, where the policy's is 8
LEAVES = ("hidden", "weight", "bias")


def make_case(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The policy's inputs with leaves, loss arrays, and a teacher's hidden states, weight and bias."""
    rng = np.random.default_rng(seed + 50)
    case = shared_sources(make_inputs(seed, bias=True))
    case["loss_weights"] = torch.tensor(rng.uniform(0.1, 0.3, (R, L)), dtype=torch.float32)
    for name, shape in (("teacher_hidden", (R, L, G)), ("teacher_weight", (V, G)), ("teacher_bias", (V,))):
        case[name] = torch.tensor(rng.normal(size=shape), dtype=torch.float32)
    for name in (*LEAVES, "teacher_weight", "teacher_bias"):
        case[name] = case[name].to(dtype)
    return case


def evaluate(case: dict[str, Tensor], direction: str, **settings: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, its teacher_kl_sum, and the gradients of the leaves."""
    leaves = {name: case[name].clone().requires_grad_() for name in LEAVES}
    arrays = {name: case[name] for name in ("token_ids", "sources", "temperature", "loss_weights")}
    arrays["loss_mask"] = case["token_mask"]
    teacher = {name: case[name] for name in ("teacher_hidden", "teacher_weight", "teacher_bias")}
    loss, sums = vocabulary_kl_loss(**leaves, arrays=arrays, **teacher, direction=direction, **settings)
    assert sums["loss_sum"] == loss.detach().double()
    (2.0 * loss).backward()
    return loss.detach(), sums["teacher_kl_sum"], {name: leaf.grad / 2 for name, leaf in leaves.items()}


def full_terms(case: dict[str, Tensor], direction: str, leaves: dict[str, Tensor]) -> Tensor:
    """float64[R, L]: divergences from all logits of both models; 0 where the loss does not count."""
    rows = torch.arange(R)[:, None]
    temperature = case["temperature"][..., None].double()
    logits = leaves["hidden"][rows, case["sources"]] @ leaves["weight"].T + leaves["bias"]
    p = torch.log_softmax(logits / temperature, dim=-1)
    its_logits = case["teacher_hidden"].double() @ case["teacher_weight"].double().T + case["teacher_bias"].double()
    q = torch.log_softmax(its_logits / temperature, dim=-1)
    terms = p.exp() * (p - q) if direction == "reverse" else q.exp() * (q - p)
    return terms.sum(dim=-1) * case["token_mask"]


def kl_in_numpy(case: dict[str, Tensor], direction: str) -> float:
    """The sum over tokens that the loss counts, one at a time, by the definition with probabilities."""
    total, arrays = 0.0, {name: tensor.double().numpy() for name, tensor in case.items()}
    for row, column in np.argwhere(case["token_mask"].numpy()):
        hidden = arrays["hidden"][row, case["sources"][row, column]]
        scaled = (arrays["weight"] @ hidden + arrays["bias"]) / arrays["temperature"][row, column]
        its = arrays["teacher_weight"] @ arrays["teacher_hidden"][row, column] + arrays["teacher_bias"]
        its = its / arrays["temperature"][row, column]
        p, q = np.exp(scaled) / np.exp(scaled).sum(), np.exp(its) / np.exp(its).sum()
        first, second = (p, q) if direction == "reverse" else (q, p)
        total += float((first * np.log(first / second)).sum())
    return total


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("chunk_elements", [None, 3 * V, V])
def test_value_and_gradient_are_those_of_full_logits(direction: str, chunk_elements: int | None) -> None:
    case = make_case()
    loss, kl_sum, gradients = evaluate(case, direction, chunk_elements=chunk_elements)
    assert kl_sum.item() == pytest.approx(kl_in_numpy(case, direction), rel=1e-6)
    leaves = {name: case[name].double().requires_grad_() for name in LEAVES}
    exact = (full_terms(case, direction, leaves) * case["loss_weights"].double()).sum()
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for name, leaf in leaves.items():
        assert relative_error(gradients[name], leaf.grad) < 1e-6, name


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_teacher_that_is_the_policy_has_no_divergence_and_no_gradient(direction: str) -> None:
    case = make_case()
    rows = torch.arange(R)[:, None]
    case |= {"teacher_hidden": case["hidden"][rows, case["sources"]]}
    case |= {"teacher_weight": case["weight"], "teacher_bias": case["bias"]}
    loss, kl_sum, gradients = evaluate(case, direction)
    assert loss == kl_sum == 0
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients.values())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_hundreds_apart_give_finite_values_and_gradients(direction: str) -> None:
    case = make_case()
    case["weight"] *= 300
    case["teacher_weight"] *= -300
    loss, _, gradients = evaluate(case, direction)
    assert loss > 100 and torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mask_what_the_loss_does_not_count_changes_nothing(direction: str) -> None:
    case = make_case()
    expected = evaluate(case, direction)
    hidden = case["token_mask"][..., None]
    found = evaluate({**case, "teacher_hidden": case["teacher_hidden"].where(hidden, float("nan"))}, direction)
    assert found[:2] == expected[:2]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in LEAVES)


def test_without_a_token_value_and_gradients_are_zeros() -> None:
    case = make_case()
    case["token_mask"] = torch.zeros_like(case["token_mask"])
    loss, kl_sum, gradients = evaluate(case, "reverse")
    assert loss == kl_sum == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_split_tokens_add_up(direction: str) -> None:
    case = make_case()
    loss, _, gradients = evaluate(case, direction)
    chosen = torch.arange(R * L).reshape(R, L) % 2 == 0
    parts = [evaluate({**case, "token_mask": case["token_mask"] & half}, direction) for half in (chosen, ~chosen)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    for name in LEAVES:
        torch.testing.assert_close(parts[0][2][name] + parts[1][2][name], gradients[name])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bfloat16_gradients_are_near_those_of_float32(direction: str) -> None:
    rounded = make_case(dtype=torch.bfloat16)
    _, _, exact = evaluate(
        {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in rounded.items()}, direction
    )
    _, _, gradients = evaluate(rounded, direction)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
    assert all(relative_error(gradients[name], exact[name]) < 3e-2 for name in LEAVES)


def test_refusal_of_another_vocabulary_and_of_other_tokens() -> None:
    case = make_case()
    with pytest.raises(ValueError, match=r"the teacher has logits for 10 tokens, the policy 11"):
        evaluate({**case, "teacher_weight": case["teacher_weight"][:10]}, "reverse")
    with pytest.raises(ValueError, match=r"teacher_hidden is \(2, 5, 5\), of tokens \(2, 6\)"):
        evaluate({**case, "teacher_hidden": case["teacher_hidden"][:, :5]}, "reverse")
