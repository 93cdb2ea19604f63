"""Test which earlier weights are kept, and that the live ones are restored."""

import pytest
import torch

from consumer.models.weight_history import WeightHistory


def model() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2, 3), 1.0)), torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))]


def set_to(parameters: list[torch.nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


def values(parameters: list[torch.nn.Parameter]) -> set[float]:
    return {value for parameter in parameters for value in parameter.flatten().tolist()}


def test_the_newest_versions_are_kept_and_seen_in_place_of_the_live_ones() -> None:
    parameters = model()
    history = WeightHistory(parameters, max_versions=2)
    for version in (0, 2, 4):
        set_to(parameters, version + 1.0)
        history.keep(version)
    set_to(parameters, 9.0)
    assert history.versions == {2, 4}
    for version in (2, 4, 2):
        with history.swapped_in(version):
            assert values(parameters) == {version + 1.0}
        assert values(parameters) == {9.0}
    with pytest.raises(KeyError), history.swapped_in(0):
        pass


def test_the_live_weights_come_back_bit_for_bit_also_after_an_error() -> None:
    parameters = [torch.nn.Parameter(torch.tensor([0.1, -0.0, float("nan"), 1e-45]))]
    history = WeightHistory(parameters, max_versions=1)
    history.keep(0)
    before = parameters[0].detach().clone().view(torch.int32)
    with pytest.raises(RuntimeError, match="a forward that fails"), history.swapped_in(0):
        raise RuntimeError("a forward that fails")
    assert parameters[0].detach().view(torch.int32).equal(before)


def test_tensors_of_any_shape_and_of_several_pieces_trade_places_whole() -> None:
    shapes = ((), (0,), (3,), (2**11 + 1, 2**10), (3, 2**20 + 1))
    parameters = [torch.nn.Parameter(torch.rand(shape)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.rand(5, 4).T))
    start = [parameter.detach().clone() for parameter in parameters]
    history = WeightHistory(parameters, max_versions=1)
    history.keep(0)
    set_to(parameters, 9.0)
    with history.swapped_in(0):
        assert all(torch.equal(found, expected) for found, expected in zip(parameters, start, strict=True))
    assert all((parameter == 9.0).all() for parameter in parameters)


def test_of_no_versions_none_is_kept() -> None:
    history = WeightHistory(model(), max_versions=0)
    history.keep(0)
    assert history.versions == frozenset()


def test_a_new_version_uses_the_memory_of_the_one_that_is_forgotten() -> None:
    parameters = model()
    history = WeightHistory(parameters, max_versions=1)
    history.keep(0)
    memory = [copy.data_ptr() for copy in history._kept[0]]
    history.keep(1)
    assert [copy.data_ptr() for copy in history._kept[1]] == memory
