"""Test on a GPU what context-parallel ranks compute: the varlen kernel's forward and backward, below autograd."""

from types import SimpleNamespace

import pytest
import torch

from consumer.models.context_attention import _attend, _attend_backward
from consumer.models.context_cut import OwnPiece
from consumer.models.path_attention import ForBackward, Settings

# Of two rows of 24 tokens: the end of a sample, a piece behind a shared prefix, and a whole sample.
PIECES = (
    (OwnPiece(length=7, ranges=((0, 12),)), OwnPiece(length=5, ranges=((0, 4), (17, 22)))),
    (OwnPiece(length=12, ranges=((12, 24),)),),
)


def results_on(device: str, dtype: torch.dtype, window: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, gradient = (torch.randn(2, 12, 4, 16, generator=generator) for _ in range(2))
    key, value = (torch.randn(2, 24, 2, 16, generator=generator) for _ in range(2))
    query, gradient, key, value = (each.to(torch.bfloat16).to(device, dtype) for each in (query, gradient, key, value))
    part, settings = SimpleNamespace(pieces=PIECES), Settings(window, 0.25, 24)
    attended, log_sums = _attend(query, key, value, part, settings)
    found = _attend_backward(ForBackward(gradient, attended, log_sums, query, key, value), part, settings)
    return [each.float().cpu() for each in (attended, *found)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_ranks_that_share_rows_attend_on_a_gpu_as_on_a_cpu(dtype: torch.dtype, window: int | None) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    for found, right in zip(results_on("cuda", dtype, window), results_on("cpu", torch.float32, window), strict=True):
        assert (found - right).norm() < tolerance * right.norm()
