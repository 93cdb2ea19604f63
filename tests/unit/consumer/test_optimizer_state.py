"""Test that an optimizer continues unchanged after packing and unpacking its state."""

import pytest
import torch
from torch import Tensor

from consumer.optim.optimizer_state import pack_state, unpack_state

KINDS = ("master", "step", "exp_avg", "exp_avg_sq")


def make(value: float = 1.0) -> tuple[dict[str, Tensor], torch.optim.AdamW]:
    named = {name: torch.full((3, 2), value, requires_grad=True) for name in "ab"}
    return named, torch.optim.AdamW(named.values(), lr=0.1, fused=True)


def step(named: dict[str, Tensor], optimizer: torch.optim.AdamW, size: float) -> None:
    for parameter in named.values():
        parameter.grad = size * torch.tensor([[1.0, -2.0], [3.0, -4.0], [5.0, -6.0]])
    optimizer.step()


def packed_of(named: dict[str, Tensor], optimizer: torch.optim.AdamW) -> dict[tuple[str, str], Tensor]:
    """(name, kind) to a copy."""
    return {
        (name, kind): tensor.clone()
        for name, master in named.items()
        for kind, tensor in pack_state(optimizer, master, with_master=True).items()
    }


@pytest.mark.parametrize("as_views", [False, True], ids=["whole", "columns of a larger tensor"])
def test_it_goes_on_bit_for_bit(as_views: bool) -> None:
    named, optimizer = make()
    step(named, optimizer, 1.0)
    packed = packed_of(named, optimizer)
    assert set(packed) == {(name, kind) for kind in ("master", "step", "exp_avg", "exp_avg_sq") for name in "ab"}

    def get(name: str, kind: str) -> Tensor:
        tensor = packed[name, kind]
        # A shard cut out by columns is no contiguous tensor; the fused kernel would walk through it as if it were.
        return torch.cat([tensor, -tensor], dim=1).chunk(2, dim=1)[0] if as_views and tensor.dim() else tensor

    other, resumed = make(5.0)
    unpack_state(resumed, other, get, KINDS)
    for trained, its_optimizer in ((named, optimizer), (other, resumed)):
        step(trained, its_optimizer, 0.5)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_what_was_unpacked_is_a_copy() -> None:
    named, optimizer = make()
    step(named, optimizer, 1.0)
    packed = packed_of(named, optimizer)
    before = {key: tensor.clone() for key, tensor in packed.items()}
    other, resumed = make(5.0)
    unpack_state(resumed, other, lambda name, kind: packed[name, kind], KINDS)
    step(other, resumed, 0.5)
    assert all(torch.equal(packed[key], tensor) for key, tensor in before.items())


def test_a_parameter_that_is_its_own_master_has_none() -> None:
    named, optimizer = make()
    step(named, optimizer, 1.0)
    assert set(pack_state(optimizer, named["a"], with_master=False)) == {"step", "exp_avg", "exp_avg_sq"}


def test_before_the_first_step_there_are_only_masters() -> None:
    named, optimizer = make()
    packed = packed_of(named, optimizer)
    assert set(packed) == {("a", "master"), ("b", "master")}
    other, resumed = make(5.0)
    unpack_state(resumed, other, lambda name, kind: packed.get((name, kind)), KINDS)
    assert other["b"].unique().tolist() == [1.0]
    assert not resumed.state


def test_numbers_that_are_no_tensors_keep_their_type() -> None:
    named, optimizer = make()
    parameter = named["a"]
    optimizer.state[parameter] = {"count": 3, "decay": 0.5, "is_warm": True, "momentum": None, "sum": torch.ones(3, 2)}
    packed = {("a", kind): value for kind, value in pack_state(optimizer, parameter, with_master=False).items()}
    assert {kind for _, kind in packed} == {"count.int", "decay.float", "is_warm.bool", "sum"}
    unpack_state(optimizer, {"a": parameter}, lambda name, kind: packed.get((name, kind)), {kind for _, kind in packed})
    state = optimizer.state[parameter]
    assert {name: value for name, value in state.items() if name != "sum"} == {
        "count": 3,
        "decay": 0.5,
        "is_warm": True,
    }
    assert [type(state[name]) for name in ("count", "decay", "is_warm", "sum")] == [int, float, bool, Tensor]


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]])
def test_state_is_in_one_order_whatever_that_of_its_kinds_since_ranks_gather_it_in_this_order(
    kinds: tuple[str, ...],
) -> None:
    named, optimizer = make()
    step(named, optimizer, 1.0)
    packed = packed_of(named, optimizer)
    other, resumed = make(5.0)
    unpack_state(resumed, other, lambda name, kind: packed[name, kind], kinds)
    assert [list(resumed.state[master]) for master in other.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 2
