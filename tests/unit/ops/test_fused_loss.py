"""Test the fused loss against the same loss on full float64 logits, and against the path that recomputes."""

import pytest
import torch
from torch import Tensor

from coati_rl.ops import vocab_chunks
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from tests.unit.ops.lm_head import (
    H,
    L,
    R,
    V,
    chosen_entropy,
    chosen_logprobs,
    make_inputs,
    make_micro_batch,
)
from tests.unit.ops.lm_head import relative_error as error
from tests.unit.ops.tensor_sizes import TensorSizes
from tests.unit.ops.token_loss import TokenLoss

LOSS = TokenLoss()
WITHOUT_ENTROPY = TokenLoss(entropy_coeff=0.0)
SUMS = {"num_tokens", "loss_sum", "entropy_sum", "clip_sum", "ratio_max"}

Head = dict[str, Tensor | None]


def leaves_of(inputs: Head, dtype: torch.dtype = torch.float32) -> Head:
    """Own copies of hidden states and LM head that carry gradient."""
    names = ("hidden", "weight", "bias")
    return {
        name: None if inputs[name] is None else inputs[name].to(dtype, copy=True).requires_grad_() for name in names
    }


def recomputed(head: Head, tensors: dict[str, Tensor], **settings: int) -> tuple[Tensor, dict[str, Tensor]]:
    arrays = (tensors[name] for name in ("token_ids", "sources", "loss_mask", "temperature"))
    logprobs, entropy = token_logprobs(*head.values(), *arrays, **settings)
    return LOSS(logprobs, entropy, tensors)


@pytest.mark.parametrize("loss_fn", [LOSS, WITHOUT_ENTROPY])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 7, 100])
def test_value_and_gradient_are_those_of_the_loss_on_full_logits(
    loss_fn: TokenLoss, bias: bool, tokens_per_chunk: int
) -> None:
    inputs = make_inputs(bias=bias)
    tensors = make_micro_batch(inputs)
    ours, exact = leaves_of(inputs), leaves_of(inputs, torch.float64)
    loss, sums = fused_token_loss(**ours, arrays=tensors, loss_fn=loss_fn, chunk_elements=tokens_per_chunk * V)
    of_head = {**inputs, **exact}
    exact_loss, exact_sums = loss_fn(chosen_logprobs(of_head), chosen_entropy(of_head), tensors)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=1e-6)
    assert sums.keys() == SUMS
    for name, value in sums.items():
        assert value.dtype == torch.float64 and not value.requires_grad
        torch.testing.assert_close(value, exact_sums[name], rtol=3e-6, atol=3e-6, msg=name)
    assert 0 < sums["clip_sum"] < 7 == sums["num_tokens"]
    loss.backward()
    exact_loss.backward()
    for name in ["hidden", "weight"] + ["bias"] * bias:
        assert error(ours[name].grad, exact[name].grad) < 1e-6, name


def test_fused_and_recomputed_paths_agree() -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    first, second = leaves_of(inputs), leaves_of(inputs)
    fused, fused_sums = fused_token_loss(**first, arrays=tensors, loss_fn=LOSS, chunk_elements=2 * V)
    loss, sums = recomputed(second, tensors, chunk_elements=2 * V)
    torch.testing.assert_close(fused, loss, rtol=1e-6, atol=0)
    for name, value in sums.items():
        torch.testing.assert_close(fused_sums[name], value, rtol=1e-6, atol=1e-7, msg=name)
    fused.backward()
    loss.backward()
    for name in first:
        assert error(first[name].grad, second[name].grad) < 5e-7, name


def test_gradient_is_that_of_finite_differences() -> None:
    inputs = make_inputs()
    tensors = make_micro_batch(inputs)
    smooth = TokenLoss(clip_low=0.99, clip_high=1e6)  # no kink nearby
    head = leaves_of(inputs)
    fused_token_loss(**head, arrays=tensors, loss_fn=smooth)[0].backward()
    for name in ("hidden", "weight"):
        step = torch.zeros_like(head[name], dtype=torch.float64)
        step.view(-1)[H + 3] = 1e-5  # of the second hidden state, which predicts an asked token, and the second id
        values = []
        for sign in (1, -1):
            moved = {**inputs, name: inputs[name].double() + sign * step}
            values.append(smooth(chosen_logprobs(moved), chosen_entropy(moved), tensors)[0])
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(head[name].grad.view(-1)[H + 3].double(), slope, rtol=1e-4, atol=1e-6)


def test_mask_what_the_loss_does_not_count_may_hold_anything() -> None:
    inputs = make_inputs()
    tensors = make_micro_batch(inputs)
    mask = tensors["loss_mask"]
    spoilt = {n: t.masked_fill(~mask, float("nan")) if t.is_floating_point() else t for n, t in tensors.items()}
    hidden = inputs["hidden"].clone()
    unused = ~torch.cat([mask[:, 1:], torch.zeros(R, 1, dtype=torch.bool)], dim=1)
    hidden[unused] = float("nan")
    clean, dirty = leaves_of(inputs), leaves_of({**inputs, "hidden": hidden})
    expected, _ = fused_token_loss(**clean, arrays=tensors, loss_fn=LOSS)
    loss, sums = fused_token_loss(**dirty, arrays=spoilt, loss_fn=LOSS)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(value.isfinite() for value in sums.values())
    assert torch.equal(dirty["weight"].grad, clean["weight"].grad)
    assert torch.equal(dirty["hidden"].grad, clean["hidden"].grad)
    assert not dirty["hidden"].grad[unused].any()


def test_mask_without_any_token_gives_zeros_that_still_reach_every_parameter() -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs) | {"loss_mask": torch.zeros(R, L, dtype=torch.bool)}
    head = leaves_of(inputs)
    loss, sums = fused_token_loss(**head, arrays=tensors, loss_fn=LOSS)
    loss.backward()
    assert loss == 0
    assert sums.keys() == SUMS
    assert not any(sums.values())
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in head.values())


def test_split_rows_one_by_one_add_up_to_loss_and_gradient_of_all() -> None:
    inputs = make_inputs()
    tensors = make_micro_batch(inputs)
    whole, parts = leaves_of(inputs), leaves_of(inputs)
    loss, _ = fused_token_loss(**whole, arrays=tensors, loss_fn=LOSS)
    loss.backward()
    total = 0.0
    for row in range(R):
        part = {name: t[row : row + 1] if t.dim() else t for name, t in tensors.items()}
        hidden = parts["hidden"][row : row + 1]
        row_loss, _ = fused_token_loss(hidden, parts["weight"], None, part, LOSS)
        row_loss.backward()
        total += row_loss.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(whole["weight"].grad, parts["weight"].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole["hidden"].grad, parts["hidden"].grad, rtol=1e-5, atol=1e-6)


def test_gradient_is_multiplied_by_what_follows_the_loss() -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    plain, scaled = leaves_of(inputs), leaves_of(inputs)
    fused_token_loss(**plain, arrays=tensors, loss_fn=LOSS)[0].backward()
    (-4.0 * fused_token_loss(**scaled, arrays=tensors, loss_fn=LOSS)[0]).backward()
    for name in plain:
        assert torch.equal(scaled[name].grad, -4.0 * plain[name].grad)


def test_gradients_that_nobody_asks_for_are_not_computed() -> None:
    inputs = make_inputs(bias=True, vocabulary=1000)
    tensors = make_micro_batch(inputs)
    head = leaves_of(inputs)
    with TensorSizes() as sizes, torch.no_grad():
        loss, sums = fused_token_loss(**head, arrays=tensors, loss_fn=LOSS)
    assert not loss.requires_grad
    assert (1000, H) not in sizes.shapes
    frozen = {**leaves_of(inputs), "weight": inputs["weight"], "bias": inputs["bias"]}
    with TensorSizes() as sizes:
        with_gradient, same_sums = fused_token_loss(**frozen, arrays=tensors, loss_fn=LOSS)
        with_gradient.backward()
    assert (1000, H) not in sizes.shapes
    assert torch.equal(loss, with_gradient)
    assert sums == same_sums
    fused_token_loss(**head, arrays=tensors, loss_fn=LOSS)[0].backward()
    assert torch.equal(frozen["hidden"].grad, head["hidden"].grad)


def test_entropy_that_is_only_reported_leaves_gradients_as_they_are_and_costs_nothing() -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)

    class OnDetached(TokenLoss):
        def __call__(self, logprobs: Tensor, entropy: Tensor, arrays: dict[str, Tensor]) -> tuple[Tensor, dict]:
            return super().__call__(logprobs, entropy.detach(), arrays)

    heads, sizes = [], []
    for loss_fn in (WITHOUT_ENTROPY, OnDetached(), LOSS):
        heads.append(leaves_of(inputs))
        with TensorSizes() as seen:
            fused_token_loss(**heads[-1], arrays=tensors, loss_fn=loss_fn)[0].backward()
        sizes.append(seen)
    unused, detached, used = heads
    for name in unused:
        assert torch.equal(unused[name].grad, detached[name].grad), name
        assert error(used[name].grad, unused[name].grad) > 1e-2, name
    assert [torch.ops.aten.special_entr in seen.operations for seen in sizes] == [False, False, True]


def test_blocks_of_rows_within_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    at_once, in_blocks = leaves_of(inputs), leaves_of(inputs)
    fused_token_loss(**at_once, arrays=tensors, loss_fn=LOSS)[0].backward()
    monkeypatch.setattr(vocab_chunks, "BLOCK_ELEMENTS", 3 * V)  # 3, 3 and 1 of the 7 tokens
    with TensorSizes() as sizes:
        fused_token_loss(**in_blocks, arrays=tensors, loss_fn=LOSS)[0].backward()
    assert {(3, V), (1, V)} <= sizes.shapes
    for name in at_once:
        torch.testing.assert_close(in_blocks[name].grad, at_once[name].grad, rtol=1e-6, atol=1e-7)


def test_gradient_of_a_loss_of_entropies_alone_is_that_on_full_logits() -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    ours, exact = leaves_of(inputs), leaves_of(inputs, torch.float64)

    class EntropySum:
        is_token_separable = True

        def __call__(self, logprobs: Tensor, entropy: Tensor, arrays: dict[str, Tensor]) -> tuple[Tensor, dict]:
            return (arrays["loss_weights"] * entropy).sum(), {}

    fused_token_loss(**ours, arrays=tensors, loss_fn=EntropySum(), chunk_elements=3 * V)[0].backward()
    (tensors["loss_weights"] * chosen_entropy({**inputs, **exact})).sum().backward()
    for name in ours:
        assert error(ours[name].grad, exact[name].grad) < 1e-6, name


@pytest.mark.parametrize("lead", [95.0, 500.0])  # nats: exp(-95) is subnormal in float32, exp(-500) is 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_lead_of_one_logit_gives_finite_gradients(dtype: torch.dtype, lead: float) -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    inputs["bias"][3] += lead
    tensors["ref_logprobs"] = tensors["old_logprobs"] = chosen_logprobs(inputs).float()
    head = leaves_of(inputs, dtype)
    loss, sums = fused_token_loss(**head, arrays=tensors, loss_fn=LOSS)
    loss.backward()
    assert sums["entropy_sum"].isfinite()
    assert all(leaf.grad.isfinite().all() for leaf in head.values())


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_near_float32_and_gradients_have_the_dtype_that_the_parameter_asks_for(
    grad_dtype: torch.dtype,
) -> None:
    inputs = make_inputs(bias=True)
    tensors = make_micro_batch(inputs)
    half = leaves_of(inputs, torch.bfloat16)
    half["weight"].grad_dtype = grad_dtype
    full = leaves_of({name: None if t is None else t.detach().float() for name, t in half.items()})
    loss, _ = fused_token_loss(**half, arrays=tensors, loss_fn=LOSS, chunk_elements=2 * V)
    exact, _ = fused_token_loss(**full, arrays=tensors, loss_fn=LOSS)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=3e-2)
    loss.backward()
    exact.backward()
    assert [half[name].grad.dtype for name in half] == [torch.bfloat16, grad_dtype, torch.bfloat16]
    for name in half:
        assert error(half[name].grad, full[name].grad) < 3e-2, name


@pytest.mark.parametrize("loss_fn", [LOSS, WITHOUT_ENTROPY])
def test_logits_are_computed_once_and_only_one_chunk_of_them_exists_at_a_time(loss_fn: TokenLoss) -> None:
    inputs = make_inputs(vocabulary=1000)
    tensors = make_micro_batch(inputs)
    head = leaves_of(inputs)
    with TensorSizes() as sizes:
        fused_token_loss(**head, arrays=tensors, loss_fn=loss_fn, chunk_elements=3 * 1000)[0].backward()
    assert sizes.largest(but=[(1000, H), (H, 1000)]) == 3 * 1000  # of 12 tokens, 7 of them asked for
    # Per chunk of 3, 3 and 1 tokens: logits, gradient of hidden states, gradient of the LM head.
    assert sizes.num_products == 3 * 3


def test_refusal_of_losses_that_see_other_tokens_of_shapes_that_differ_and_of_a_second_backward() -> None:
    inputs = make_inputs()
    tensors = make_micro_batch(inputs)
    head = leaves_of(inputs)

    class SequenceLoss:
        is_token_separable = False

    with pytest.raises(ValueError, match="SequenceLoss is not separable by token"):
        fused_token_loss(**head, arrays=tensors, loss_fn=SequenceLoss())
    with pytest.raises(ValueError, match="advantages must have the shape of token_ids"):
        fused_token_loss(**head, arrays=tensors | {"advantages": torch.zeros(R)}, loss_fn=LOSS)
    with pytest.raises(ValueError, match="whose source is not a place in its row, 0 to 5"):
        everywhere = torch.ones(R, L, dtype=torch.bool)
        fused_token_loss(**head, arrays=tensors | {"loss_mask": everywhere}, loss_fn=LOSS)
    loss, _ = fused_token_loss(**head, arrays=tensors, loss_fn=LOSS)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()
