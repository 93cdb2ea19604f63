"""Test that reports are reduced by the rule in their names."""

import torch

from coati_rl.algorithms.sums import is_maximum, merge_sums


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_sums_add_maxima_do_not_and_single_keys_are_kept() -> None:
    merged = merge_sums(
        {"loss_sum": number(1.5), "gap_max": number(3.0), "clip_sum": number(4.0)},
        {"loss_sum": number(2.0), "gap_max": number(2.0), "kl_sum": number(7.0)},
    )
    assert {name: value.item() for name, value in merged.items()} == {
        "loss_sum": 3.5,
        "gap_max": 3.0,
        "clip_sum": 4.0,
        "kl_sum": 7.0,
    }


def test_merging_changes_neither_report() -> None:
    first = {"loss_sum": number(1.0)}
    merge_sums(first, {"loss_sum": number(1.0)})
    assert first["loss_sum"].item() == 1.0


def test_only_keys_that_end_in_max_are_maxima() -> None:
    assert is_maximum("ratio_max")
    assert not is_maximum("max_sum")
