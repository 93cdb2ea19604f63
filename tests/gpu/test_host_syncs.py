"""Test that a trainer's forward and backward never wait for the GPU, so that the host queues kernels ahead."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bench.mfu import SHAPES, make_backend, make_samples

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MiniBatch
from coati_rl.batching.packing import pack

LENGTHS = (96, 64, 48, 33)


def mini_batch(*, shares: bool) -> MiniBatch:
    samples = make_samples(LENGTHS, SHAPES["tiny"][0])
    if shares:  # a prompt, whose last token predicts the first one of each
        prefix = samples[0].prefix_ids
        samples = [replace(sample, uid="same", number=n, prefix_ids=prefix) for n, sample in enumerate(samples)]
    (micro_batches,) = pack(samples, max_samples=len(samples), shares_prefixes=shares)
    (only,) = micro_batches
    assert (np.unique(only.loss_arrays["sources"]).size < only.loss_arrays["loss_mask"].sum()) == shares
    return MiniBatch(step=0, micro_batches=(only,), is_last=False, loss_scale=1.0, learning_rate_progress=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [False, True])
def test_a_micro_batch_is_computed_without_waiting_for_the_gpu(shares: bool) -> None:
    backend, batch = make_backend("tiny", torch.device("cuda")), mini_batch(shares=shares)
    first = backend.forward_backward(batch, PolicyLoss())  # allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = backend.forward_backward(batch, PolicyLoss())
        with pytest.raises(RuntimeError, match="synchroniz"):  # the mode sees a wait
            again["loss_sum"].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again["loss_sum"].item() == first["loss_sum"].item() != 0
