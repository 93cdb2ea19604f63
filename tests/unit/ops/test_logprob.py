"""Test log-probabilities and entropies against NumPy, gradients against torch's log_softmax, all in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.ops.logprob import token_logprobs
from coati_rl.ops.vocab_chunks import sum_rows, token_choice
from tests.unit.ops.lm_head import (
    H,
    L,
    R,
    V,
    chosen_entropy,
    chosen_logprobs,
    gathered,
    make_inputs,
    relative_error,
    shared_sources,
)
from tests.unit.ops.tensor_sizes import TensorSizes


def numpy_oracle(inputs: dict[str, Tensor | None]) -> tuple[np.ndarray, np.ndarray]:
    value = {name: None if tensor is None else tensor.double().numpy() for name, tensor in inputs.items()}
    logprobs, entropy = np.zeros((2, R, L))
    for r, t in zip(*np.nonzero(value["token_mask"]), strict=True):
        logits = value["weight"] @ value["hidden"][r, t - 1] + (0 if value["bias"] is None else value["bias"])
        odds = np.exp(logits / value["temperature"][r, t])
        probabilities = odds / odds.sum()
        logprobs[r, t] = np.log(probabilities[int(value["token_ids"][r, t])])
        entropy[r, t] = -(probabilities * np.log(probabilities)).sum()
    return logprobs, entropy


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 7, 100])
def test_value_each_entry_is_that_of_the_token_at_its_place(bias: bool, tokens_per_chunk: int) -> None:
    inputs = make_inputs(bias=bias)
    logprobs, entropy = token_logprobs(**inputs, chunk_elements=tokens_per_chunk * V)
    expected_logprobs, expected_entropy = numpy_oracle(inputs)
    np.testing.assert_allclose(logprobs.numpy(), expected_logprobs, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("used", [("logprobs",), ("entropy",), ("logprobs", "entropy")])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_gradient_is_that_of_log_softmax_over_full_logits(
    used: tuple[str, ...], bias: bool, tokens_per_chunk: int
) -> None:
    inputs = make_inputs(bias=bias)
    weights = torch.tensor(np.random.default_rng(1).normal(size=(2, R, L)), dtype=torch.float32)
    names = ["hidden", "weight"] + (["bias"] if bias else [])
    ours = {name: inputs[name].clone().requires_grad_() for name in names}
    exact = {name: inputs[name].double().requires_grad_() for name in names}
    values = token_logprobs(**{**inputs, **ours}, chunk_elements=tokens_per_chunk * V)
    exact_values = (chosen_logprobs({**inputs, **exact}), chosen_entropy({**inputs, **exact}))
    for logprobs, entropy in (values, exact_values):
        weighted = {"logprobs": weights[0] * logprobs, "entropy": weights[1] * entropy}
        sum(weighted[name].sum() for name in used).backward()
    # An entropy's gradient, -p (log p + entropy), is a small difference. How it is rounded depends on the processor's
    # instructions: over eight seeds of inputs at most 1.5e-6 on an Intel Xeon, where float32 autograd has up to 6.5e-7.
    bound = 1e-6 if used == ("logprobs",) else 2e-6
    for name in names:
        assert relative_error(ours[name].grad, exact[name].grad) < bound, name


def test_entropy_that_is_unused_or_detached_leaves_the_gradient_as_it_is_and_costs_nothing() -> None:
    inputs = make_inputs()
    weights, operations = [], []
    for loss_of in (
        lambda logprobs, entropy: logprobs.sum(),
        lambda logprobs, entropy: (logprobs + entropy.detach()).sum(),
        lambda logprobs, entropy: (logprobs + entropy).sum(),
    ):
        weights.append(inputs["weight"].clone().requires_grad_())
        with TensorSizes() as sizes:
            loss_of(*token_logprobs(**{**inputs, "weight": weights[-1]})).backward()
        operations.append(sizes.operations)
    unused, detached, used = (weight.grad for weight in weights)
    assert torch.equal(detached, unused)
    assert relative_error(used, unused) > 1e-2
    assert [torch.ops.aten.special_entr in seen for seen in operations] == [False, False, True]


@pytest.mark.parametrize("lead", [95.0, 500.0])  # nats: exp(-95) is subnormal in float32, exp(-500) is 0
def test_entropy_of_a_token_that_is_certain_has_no_slope(lead: float) -> None:
    inputs = make_inputs(bias=True)
    inputs["weight"] *= 0.1
    inputs["bias"] = torch.zeros(V)
    inputs["bias"][3] = 1.5 * lead  # temperatures are up to 1.5
    head = {name: inputs[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    _, entropy = token_logprobs(**{**inputs, **head})
    entropy.sum().backward()
    assert entropy.abs().max() < 1e-30
    for leaf in head.values():
        assert leaf.grad.isfinite().all()
        assert leaf.grad.abs().max() < 1e-30


def test_gradient_of_a_head_tied_to_the_embedding_is_the_sum_of_both_uses() -> None:
    inputs = make_inputs()
    shared = inputs["weight"].clone().requires_grad_()
    logprobs, _ = token_logprobs(**{**inputs, "hidden": shared[inputs["token_ids"]], "weight": shared})
    logprobs.sum().backward()
    exact = inputs["weight"].double().requires_grad_()
    chosen_logprobs({**inputs, "hidden": exact[inputs["token_ids"]], "weight": exact}).sum().backward()
    assert relative_error(shared.grad, exact.grad) < 1e-6


def test_mask_tokens_not_asked_for_are_zero_and_their_hidden_states_get_no_gradient() -> None:
    inputs = make_inputs()
    hidden = inputs["hidden"].clone()
    unused = ~torch.cat([inputs["token_mask"][:, 1:], torch.zeros(R, 1, dtype=torch.bool)], dim=1)
    hidden[unused] = float("nan")
    hidden.requires_grad_()
    temperature = inputs["temperature"].masked_fill(~inputs["token_mask"], 0.0)
    logprobs, entropy = token_logprobs(**{**inputs, "hidden": hidden, "temperature": temperature})
    (logprobs + entropy).sum().backward()
    assert not logprobs[~inputs["token_mask"]].any()
    assert not entropy[~inputs["token_mask"]].any()
    assert not hidden.grad[unused].any()
    assert torch.isfinite(hidden.grad).all()


def test_mask_without_any_token_gives_zeros_that_still_reach_every_parameter() -> None:
    inputs = make_inputs(bias=True)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    none = torch.zeros(R, L, dtype=torch.bool)
    logprobs, entropy = token_logprobs(**{**inputs, **leaves, "token_mask": none})
    (logprobs + entropy).sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves.values())


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_gradient_of_a_hidden_state_that_predicts_several_tokens_is_the_sum_of_theirs(tokens_per_chunk: int) -> None:
    inputs = shared_sources(make_inputs(bias=True))
    names = ("hidden", "weight", "bias")
    ours = {name: inputs[name].clone().requires_grad_() for name in names}
    exact = {name: inputs[name].double().requires_grad_() for name in names}
    values = token_logprobs(**{**inputs, **ours}, chunk_elements=tokens_per_chunk * V)
    exact_values = gathered({**inputs, **exact})
    for value, exact_value in zip(values, exact_values, strict=True):
        torch.testing.assert_close(value.double(), exact_value, rtol=1e-6, atol=1e-6)
    for logprobs, entropy in (values, exact_values):
        (logprobs.square().sum() + entropy.sum()).backward()
    for name in names:
        assert relative_error(ours[name].grad, exact[name].grad) < 1e-6, name


def summed(rows: Tensor, sources: list[int], *, length: int) -> Tensor:
    choice = token_choice(np.ones((1, len(sources)), dtype=bool), np.array([sources]), length=length)
    return sum_rows(rows, choice.sharing, length=length)


def test_rows_are_summed_by_place_in_their_order() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    assert summed(rows, [3, 0, 3, 1, 3], length=5).tolist() == [[2.0], [8.0], [0.0], [21.0], [0.0]]
    # In float32 only this order gives 0: (1 + 1e8) - 1e8.
    rows = torch.tensor([[1.0], [1e8], [-1e8]])
    assert summed(rows, [0, 0, 0], length=1).tolist() == [[0.0]]


def test_rows_in_bfloat16_are_summed_in_float32() -> None:
    rows = torch.ones((512, 1), dtype=torch.bfloat16)  # added one by one in bfloat16 they would stay at 256
    total = summed(torch.cat([rows, rows[:2]]), [1] * 512 + [0, 3], length=4)
    assert total.dtype == torch.bfloat16
    assert total.tolist() == [[1.0], [512.0], [0.0], [1.0]]


def test_split_rows_one_by_one_add_up_to_the_gradient_of_all() -> None:
    inputs = make_inputs()
    whole, parts = (inputs["weight"].clone().requires_grad_() for _ in range(2))
    sum(token_logprobs(**{**inputs, "weight": whole})).sum().backward()
    for row in range(R):
        part = {
            name: inputs[name][row : row + 1]
            for name in ("hidden", "token_ids", "sources", "token_mask", "temperature")
        }
        sum(token_logprobs(**part, weight=parts, bias=None)).sum().backward()
    torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-5, atol=1e-6)


def test_large_logits_neither_overflow_nor_lose_the_token() -> None:
    inputs = make_inputs()
    inputs["weight"] = inputs["weight"] * 300
    logprobs, entropy = token_logprobs(**inputs)
    expected, _ = numpy_oracle({**inputs, "temperature": inputs["temperature"] * 300, "weight": inputs["weight"]})
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert (entropy >= -1e-5).all()
    scaled, _ = token_logprobs(**{**inputs, "temperature": inputs["temperature"] * 300})
    np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_results_are_float32_also_in_bfloat16_whose_gradients_are_near_those_of_float32() -> None:
    inputs = make_inputs(bias=True)
    half = {name: inputs[name].bfloat16().requires_grad_() for name in ("hidden", "weight", "bias")}
    logprobs, entropy = token_logprobs(**{**inputs, **half}, chunk_elements=2 * V)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs - entropy).sum().backward()
    full = {name: half[name].detach().float().requires_grad_() for name in half}
    exact, exact_entropy = token_logprobs(**{**inputs, **full})
    (exact - exact_entropy).sum().backward()
    for name in half:
        assert half[name].grad.dtype == torch.bfloat16
        assert relative_error(half[name].grad, full[name].grad) < 2e-2


def test_gradient_of_a_bfloat16_head_reaches_a_float32_grad_dtype_unrounded_and_adds_up_there() -> None:
    inputs = make_inputs()
    hidden = inputs["hidden"].bfloat16()
    weight = inputs["weight"].bfloat16().requires_grad_()
    weight.grad_dtype = torch.float32
    for _ in range(2):
        token_logprobs(**{**inputs, "hidden": hidden, "weight": weight}, chunk_elements=V)[0].sum().backward()
    assert weight.grad.dtype == torch.float32
    assert (weight.grad != weight.grad.bfloat16().float()).any()
    exact = weight.detach().float().requires_grad_()
    (2 * token_logprobs(**{**inputs, "hidden": hidden.float(), "weight": exact})[0].sum()).backward()
    assert relative_error(weight.grad, exact.grad) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_one_chunk_of_logits_exists_at_a_time(dtype: torch.dtype) -> None:
    inputs = make_inputs(vocabulary=1000)
    leaves = {name: inputs[name].to(dtype).requires_grad_() for name in ("hidden", "weight")}
    with TensorSizes() as sizes:
        sum(token_logprobs(**{**inputs, **leaves}, chunk_elements=3 * 1000 + 1)).sum().backward()
    assert sizes.largest(but=[(1000, H), (H, 1000)]) == 3 * 1000  # of 12 tokens, 7 of them asked for


def test_refusal_of_a_token_without_a_source_and_of_shapes_that_differ() -> None:
    inputs = make_inputs()
    with pytest.raises(ValueError, match="whose source is not a place in its row, 0 to 5"):
        token_logprobs(**{**inputs, "token_mask": torch.ones(R, L, dtype=torch.bool)})
    with pytest.raises(ValueError, match="must agree"):
        token_logprobs(**{**inputs, "temperature": torch.ones(R, L - 1)})
