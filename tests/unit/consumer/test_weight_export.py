"""Exported weights: every tensor once, in order, in the wire's dtype."""

import torch
from torch import nn

from consumer.weight_export import export_weights


class Tied(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layer = nn.Linear(2, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.constant = nn.Buffer(torch.ones(2), persistent=False)


def test_a_tied_head_is_left_out_and_the_order_is_the_state_dicts() -> None:
    assert [name for name, _ in export_weights(Tied(), dtype=torch.float32)] == [
        "embed.weight",
        "layer.weight",
        "layer.bias",
    ]


def test_tensors_are_cast_to_the_wire_and_carry_no_gradient() -> None:
    model = Tied()
    for name, tensor in export_weights(model, dtype=torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        assert not tensor.requires_grad
        assert torch.equal(tensor, model.get_parameter(name).bfloat16())


def test_two_equal_tensors_that_are_not_shared_are_both_sent() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert "head.weight" in dict(export_weights(model, dtype=torch.float32))
