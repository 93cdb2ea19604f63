"""Sum values over whole sequences, for losses that compare the two samples of a unit.

A unit is two consecutive samples, 2u and 2u + 1 by `sample_index`: a preference pair, or an example of KTO and its
mismatched completion. Packing keeps a unit in one micro-batch. R rows, M loss tokens per row, U units.
"""

import torch
from torch import Tensor


def unit_sums(loss_mask: Tensor, sample_index: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Sum values over the loss tokens of each sample, by unit.

    Args:
        loss_mask: bool[R, M]; where it is False `values` may hold anything.
        sample_index: int[R, M], of the sample in the mini-batch.
        values: float[R, M] each; carry gradient.
    Returns: float64[U, 2] each, of units with at least one loss token, in ascending order; column 0 is the first sample
        of the unit. A sample without loss tokens has the sum 0.
    Raises: ValueError if shapes differ.
    """
    shapes = [tuple(tensor.shape) for tensor in (loss_mask, sample_index, *values)]
    if len(set(shapes)) > 1:
        raise ValueError(f"mask, sample index and values must have one shape, not {shapes}")
    index = sample_index[loss_mask].long()
    units, number = torch.unique(index // 2, return_inverse=True)
    places = 2 * number + index % 2
    # In float64, so that the order of additions on a GPU has no effect on the float32 gradient.
    zeros = torch.zeros(2 * len(units), dtype=torch.float64, device=loss_mask.device)
    return tuple(zeros.index_add(0, places, each[loss_mask].double()).view(-1, 2) for each in values)
