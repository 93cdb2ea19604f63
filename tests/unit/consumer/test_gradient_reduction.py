"""Test which gradients are summed over which ranks. Other ranks are stood in for: a sum over a group is a known
multiple.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from consumer.parallel.gradient_reduction import GradientReducer, accumulate_in_float32
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import LocalParameters, describe_parameters
from consumer.parallel.reduction import reduce_sums
from tests.unit.consumer.conftest import make_model

SUMS = {"copies": 2.0, "tensor ranks": 3.0, "tied": 5.0}  # what a sum over a group makes of this rank's gradient
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
QUERY, QUERY_NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight"


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives over groups that are names."""

    def all_reduce(tensor: Tensor, op: object = dist.ReduceOp.SUM, group: str = "") -> None:
        if op == dist.ReduceOp.MAX:
            tensor.add_(1)  # the others' largest
        else:
            tensor.mul_(SUMS[group])

    def reduce_scatter_tensor(mine: Tensor, joined: Tensor, group: str) -> None:
        mine.copy_(joined.view(2, -1)[1] * SUMS[group])  # this is the second copy

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter_tensor)


Reducer = tuple[PreTrainedModel, GradientReducer]


@pytest.fixture
def make_reducer() -> Callable[..., Reducer]:
    """(fields of the layout) -> a model, and the reducer of a rank that holds all of it."""

    def make(*, tied_group: str | None = None, **layout: object) -> Reducer:
        model = make_model(tie_word_embeddings=True)
        accumulate_in_float32(model)
        place = Layout(**layout)
        infos = describe_parameters(model, place, [2] if place.num_stages == 1 else [1, 1])
        return model, GradientReducer(LocalParameters(model, infos, place), place, tied_group=tied_group)

    return make


def set_gradients(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def multiples(gradients: dict[str, Tensor]) -> dict[str, float]:
    """What each gradient of ones has become; the same in all of its elements."""
    for gradient in gradients.values():
        assert gradient.min() == gradient.max()
    return {name: gradient.flatten()[0].item() for name, gradient in gradients.items()}


def test_copies_add_up_their_gradients_and_average_nothing(make_reducer: Callable[..., Reducer]) -> None:
    model, reducer = make_reducer(dp_size=2, dp_group="copies")
    set_gradients(model)
    gradients = reducer.reduce()
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert set(multiples(gradients).values()) == {2.0}


def test_only_gradients_that_are_shares_are_summed_over_tensor_ranks(make_reducer: Callable[..., Reducer]) -> None:
    model, reducer = make_reducer(tp_size=2, tp_group="tensor ranks")
    set_gradients(model)
    found = multiples(reducer.reduce())
    assert (found[QUERY_NORM], found[QUERY], found[NORM], found[EMBEDDING]) == (3.0, 1.0, 1.0, 1.0)
    assert sum(multiple == 3.0 for multiple in found.values()) == 4  # q_norm and k_norm of two layers


def test_a_tied_embedding_is_summed_over_its_two_stages(make_reducer: Callable[..., Reducer]) -> None:
    model, reducer = make_reducer(num_stages=2, tied_group="tied")
    set_gradients(model)
    found = multiples(reducer.reduce())
    assert {name for name, multiple in found.items() if multiple == 5.0} == {EMBEDDING}


def test_the_sums_of_a_whole_layout_multiply(make_reducer: Callable[..., Reducer]) -> None:
    groups = {"dp_group": "copies", "tp_group": "tensor ranks", "tied_group": "tied"}
    model, reducer = make_reducer(dp_size=2, tp_size=2, num_stages=2, **groups)
    set_gradients(model)
    found = multiples(reducer.reduce())
    assert (found[EMBEDDING], found[QUERY], found[QUERY_NORM], found[NORM]) == (10.0, 2.0, 6.0, 2.0)


@pytest.mark.parametrize("stage", [1, 2])
def test_under_zero_a_copy_keeps_its_slice_of_the_sum_over_micro_batches(
    make_reducer: Callable[..., Reducer], stage: int
) -> None:
    model, reducer = make_reducer(dp_rank=1, dp_size=2, dp_group="copies", zero_stage=stage)
    norm = dict(model.named_parameters())[NORM]  # 32 elements
    for _ in range(3):
        loss = sum((p * 0).sum() for p in model.parameters()) + (norm * torch.arange(32.0)).sum()
        loss.backward()
        reducer.after_backward()
        assert (norm.grad is None) == (stage == 2)  # which holds no whole gradient between micro-batches
    gradients = reducer.reduce()
    assert torch.equal(gradients[NORM], 2 * 3 * torch.arange(16.0, 32.0))
    assert all(
        gradient.numel() == -(-p.numel() // 2)
        for (_, p), gradient in zip(model.named_parameters(), gradients.values(), strict=True)
    )


def test_a_rank_without_samples_takes_part_with_zeros(make_reducer: Callable[..., Reducer]) -> None:
    _, reducer = make_reducer(dp_size=2, dp_group="copies")
    assert set(multiples(reducer.reduce()).values()) == {0.0}


def test_a_step_forgets_the_slices_of_the_one_before(make_reducer: Callable[..., Reducer]) -> None:
    model, reducer = make_reducer(dp_rank=1, dp_size=2, dp_group="copies", zero_stage=1)
    for _ in range(2):
        set_gradients(model)
        assert set(multiples(reducer.reduce()).values()) == {2.0}
        reducer.forget()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_reported_sums_are_added_up_and_maxima_compared() -> None:
    sums = {"num_tokens": torch.tensor(3.0), "ratio_max": torch.tensor(1.5), "loss_sum": torch.tensor(-1.0)}
    found = reduce_sums(sums, device=torch.device("cpu"), group="copies")
    assert found == {"num_tokens": 6.0, "loss_sum": -2.0, "ratio_max": 2.5}
    assert reduce_sums(sums, device=torch.device("cpu"), group=None)["ratio_max"] == 1.5
