"""Test that the loss through a large LM head has the gradients of full float32 logits."""

import pytest
import torch
from bench.logprob_loss import Inputs, forward_backward, make_inputs, own_logprobs
from torch import Tensor

from tests.gpu.devices import on_cpu_and_gpu, size_on

SIZES = {"cpu": (32, 32, 300), "cuda": (1024, 2048, 151936)}  # tokens, hidden size, vocabulary


def gradients(variant: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    forward_backward(variant, inputs, None)
    return inputs["hidden"].grad, inputs["weight"].grad


@on_cpu_and_gpu
# Of whole gradients, relative. bfloat16 has a rounding error of 0.4 % a number.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_gradients_are_those_of_the_loss_on_all_logits(device: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs(*SIZES[size_on(device)], dtype, torch.device(device))
    exact = inputs | {name: inputs[name].detach().float().requires_grad_() for name in ("hidden", "weight")}
    # Its own log-probabilities are others in bfloat16; the ratios stay what they were.
    exact["rollout_logprobs"] = inputs["rollout_logprobs"] + own_logprobs(exact) - own_logprobs(inputs)
    expected = gradients("naive", exact)
    for variant in ("fused", "recompute"):
        for found, right in zip(gradients(variant, inputs), expected, strict=True):
            assert float((found.float() - right).norm() / right.norm()) < tolerance, variant
