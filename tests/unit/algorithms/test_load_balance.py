"""Test the loss that balances experts: value, gradient, separate samples, agreement with transformers."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from coati_rl.algorithms.load_balance import load_balancing_loss

ONE_SAMPLE = torch.full((1, 4), 0.25)  # of four tokens
ONE = torch.ones(1)


def test_experts_with_equal_shares_cost_the_sample_s_weight() -> None:
    probabilities = torch.full((4, 2), 0.5)
    selected = torch.tensor([[0], [1], [0], [1]])
    assert load_balancing_loss(probabilities, selected, ONE_SAMPLE, ONE).item() == 1.0
    assert load_balancing_loss(probabilities, selected, ONE_SAMPLE, 3 * ONE).item() == 3.0


def test_all_tokens_at_one_of_two_experts_cost_twice_the_router_s_probability_of_it() -> None:
    probabilities = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    selected = torch.zeros(4, 1, dtype=torch.int64)
    assert load_balancing_loss(probabilities, selected, ONE_SAMPLE, ONE).item() == 2 * 0.75


def test_the_gradient_is_each_expert_s_share_over_the_sample_s_length() -> None:
    probabilities = torch.full((4, 2), 0.5, requires_grad=True)
    selected = torch.tensor([[0], [0], [0], [1]])
    load_balancing_loss(probabilities, selected, ONE_SAMPLE, ONE).backward()
    assert torch.equal(probabilities.grad, torch.tensor([[2 * 0.75 / 4, 2 * 0.25 / 4]]).expand(4, 2))


def test_samples_are_balanced_by_themselves_and_padding_does_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(9, 5, generator=generator).softmax(-1)
    selected = probabilities.topk(2).indices
    paths = torch.zeros(2, 9)
    paths[0, :3], paths[1, 3:7] = 1 / 3, 1 / 4  # two tokens are padding
    apart = [
        load_balancing_loss(probabilities[part], selected[part], torch.full((1, n), 1 / n), weight * ONE)
        for part, n, weight in ((slice(0, 3), 3, 0.5), (slice(3, 7), 4, 2.0))
    ]
    together = load_balancing_loss(probabilities, selected, paths, torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(together, sum(apart))


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_of_one_sequence_it_is_transformers_loss_over_the_experts_of_a_token(per_token: int) -> None:
    logits = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
    probabilities = logits.softmax(-1)
    found = load_balancing_loss(probabilities, probabilities.topk(per_token).indices, torch.full((1, 11), 1 / 11), ONE)
    torch.testing.assert_close(found, load_balancing_loss_func((logits,), 6, per_token) / per_token)
