"""The record of a gradient's tensor: its parts add up, in any layout, and a change shows."""

import math

import pytest
import torch

from coati_rl.ops.gradient_sketch import NUM_SUMS, place_of, summary_of
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import LocalParameters, ParameterInfo, padded_rows
from consumer.parallel.sharded_rows import RowGroup, ShardedRows

GROUP = object()  # stands for a process group, which places do not use


def whole(tensor, name="weight"):
    return summary_of(tensor, name, place_of(tuple(tensor.shape)))


def test_the_first_number_is_the_sum_of_squares_and_the_others_are_sums_with_signs():
    ones = torch.ones(3, 5)
    found = whole(ones)
    assert found[0] == 15
    for value in found[1:]:
        assert abs(value) <= 15 and value % 2 == 1, "fifteen terms of 1 or -1"
    assert torch.equal(whole(3 * ones)[1:], 3 * found[1:]), "they are linear"


def test_signs_follow_the_tensors_name_and_are_the_same_everywhere():
    tensor = torch.arange(12.0).view(3, 4)
    assert whole(tensor, "a")[1:].tolist() != whole(tensor, "b")[1:].tolist()
    assert whole(tensor, "model.norm.weight").tolist() == [506.0, 24.0, -10.0, -2.0, -22.0]


def test_swapped_rows_and_columns_of_a_tensor_show():
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    found = whole(tensor)
    for other in (tensor.roll(1, 0), tensor.roll(1, 1)):
        assert math.isclose(whole(other)[0], found[0], rel_tol=1e-12)
        assert not torch.allclose(whole(other)[1:], found[1:], rtol=1e-3)


LAYOUTS = {
    "tensor parallel, rows": ({"tp_size": 2, "tp_group": GROUP}, 0),
    "tensor parallel, columns": ({"tp_size": 2, "tp_group": GROUP}, 1),
    "ZeRO": ({"dp_size": 3, "zero_stage": 1, "dp_group": GROUP}, None),
    "ZeRO and tensor parallel": (
        {"dp_size": 3, "zero_stage": 1, "dp_group": GROUP, "tp_size": 2, "tp_group": GROUP},
        1,
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_parts_of_a_layout_add_up_to_the_whole_tensor(case):
    settings, split_dim = LAYOUTS[case]
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(1 + NUM_SUMS, dtype=torch.float64)
    for dp_rank in range(settings.get("dp_size", 1)):
        for tp_rank in range(settings.get("tp_size", 1)):
            layout = Layout(**settings, dp_rank=dp_rank, tp_rank=tp_rank)
            shard = tensor if split_dim is None else tensor.chunk(2, dim=split_dim)[tp_rank]
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(shard.clone())
            info = ParameterInfo(name="weight", shape=(6, 10), stage=0, split_dim=split_dim)
            part = padded_rows(shard, layout.dp_size)[dp_rank] if layout.is_partitioned else shard
            total += summary_of(part, "weight", LocalParameters(module, [info], layout).place("weight"))
    assert torch.allclose(total, whole(tensor), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "info"),
    [
        ({"tp_size": 2, "tp_group": GROUP}, {"split_dim": 0}),
        ({"tp_size": 2, "tp_group": GROUP}, {"split_dim": 1}),
        ({"ep_size": 2, "ep_group": GROUP}, {"is_expert": True}),
    ],
    ids=["tensor parallel, rows", "tensor parallel, columns", "experts"],
)
def test_the_rows_of_fsdp2_s_shards_add_up_over_one_copy(settings, info):
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    total = torch.zeros(1 + NUM_SUMS, dtype=torch.float64)
    for dp_rank in range(8):  # two copies of four ranks, each
        for tp_rank in range(settings.get("tp_size", 1)):
            layout = Layout(**settings, dp_rank=dp_rank, dp_size=8, fsdp_size=4, tp_rank=tp_rank)
            described = ParameterInfo(name="weight", shape=(6, 10), stage=0, **info)
            rows = ShardedRows(torch.nn.Module(), [described], layout, torch.float32)
            if rows.counts_in_norm("weight"):
                total += summary_of(rows.state_part("weight", tensor), "weight", rows.place("weight"))
    assert torch.allclose(total, whole(tensor), rtol=1e-12)


def test_the_rows_that_fsdp2_cuts_add_up_too():
    tensor = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    parts = [RowGroup(rank, 3, None).own(tensor) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 1]
    found = sum(summary_of(part, "weight", place_of((5, 4), start=8 * rank)) for rank, part in enumerate(parts))
    assert torch.allclose(found, whole(tensor), rtol=1e-12)


@pytest.mark.parametrize("shape", [(7,), (), (3, 4, 5)])
def test_vectors_numbers_and_stacks_of_matrices_have_a_record_too(shape):
    tensor = torch.full(shape, 2.0)
    assert whole(tensor)[0] == 4 * tensor.numel()
