"""An optimizer that is packed and unpacked goes on as if nothing had happened."""

import pytest
import torch
from torch import Tensor

from coati_rl.errors import ConfigError
from consumer.optimizer_state import pack_state, unpack_state


def make(values: tuple[float, float] = (1.0, -1.0)) -> tuple[dict[str, Tensor], torch.optim.AdamW]:
    named = {name: torch.full((2,), value, requires_grad=True) for name, value in zip("ab", values, strict=True)}
    return named, torch.optim.AdamW(named.values(), lr=0.1, fused=True)


def step(named: dict[str, Tensor], optimizer: torch.optim.AdamW, size: float) -> None:
    for parameter in named.values():
        parameter.grad = torch.tensor([size, -size])
    optimizer.step()


def test_it_goes_on_bit_for_bit() -> None:
    named, optimizer = make()
    step(named, optimizer, 1.0)
    packed = {key: tensor.clone() for key, tensor in pack_state(optimizer, named).items()}
    assert set(packed) == {f"{kind}/{name}" for kind in ("master", "step", "exp_avg", "exp_avg_sq") for name in "ab"}
    other, resumed = make((5.0, 5.0))
    unpack_state(resumed, other, packed)
    for trained, its_optimizer in ((named, optimizer), (other, resumed)):
        step(trained, its_optimizer, 0.5)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_before_the_first_step_there_are_only_masters() -> None:
    named, optimizer = make()
    packed = pack_state(optimizer, named)
    assert set(packed) == {"master/a", "master/b"}
    other, resumed = make((5.0, 5.0))
    unpack_state(resumed, other, packed)
    assert other["b"].tolist() == [-1.0, -1.0]
    assert not resumed.state


def test_the_state_of_another_model_is_refused_by_name() -> None:
    named, optimizer = make()
    packed = pack_state(optimizer, {"a": named["a"]})
    with pytest.raises(ConfigError, match="another model: b is not in both"):
        unpack_state(optimizer, named, packed)
