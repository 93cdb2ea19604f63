"""Test that recomputed activations give the same gradients as kept ones, without dropout."""

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MiniBatch
from consumer.backend import Backend
from consumer.models import offloaded_activations
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch

# OPT's decoder layer drops out by itself, not in a module of its own.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_dropout": 0.5},
    "llama": {"attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
}


def train(model_dir: Path, **settings: bool) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Two micro-batches with a score in between; gradients by parameter, and what ran how often: layers while
    gradients were wanted, layers while not, attention in training mode."""
    config = backend_config(model_dir, **settings)
    backend = Backend(config, SingleProcess(device=torch.device("cpu")))
    counts: Counter[str] = Counter()

    def count(module: nn.Module, _: Any) -> None:
        if isinstance(module, GradientCheckpointingLayer):
            counts["with gradient" if torch.is_grad_enabled() else "without"] += 1
        counts["in training mode"] += module.training

    for module in backend.policy.module.modules():
        module.register_forward_pre_hook(count)
    micro_batch = make_micro_batch(([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1))
    for is_last in (False, True):
        backend.score([micro_batch])
        batch = MiniBatch(
            step=0, micro_batches=(micro_batch,), is_last=is_last, loss_scale=1.0, learning_rate_progress=0.0
        )
        backend.forward_backward(batch, PolicyLoss())
    backend.reduce_gradients()
    return backend.policy.gradients, counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", MODELS)
def test_gradients_are_the_same_and_every_layer_ran_twice(save_model: Callable[..., Path], model_type: str) -> None:
    model_dir = save_model(model_type, **MODELS[model_type])
    kept, kept_counts = train(model_dir, gradient_checkpointing=False)
    recomputed, counts = train(model_dir, gradient_checkpointing=True)
    assert kept_counts == {"with gradient": 4, "without": 4, "in training mode": 0}  # 2 layers, 2 micro-batches
    assert counts == {"with gradient": 8, "without": 4, "in training mode": 0}
    assert kept.keys() == recomputed.keys()
    assert any(gradient.any() for gradient in kept.values())
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in kept.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", MODELS)
def test_offloaded_inputs_of_layers_are_all_that_is_kept_and_come_back_for_the_backward(
    save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    kept = list[weakref.ref[torch.Tensor]]()
    left = list[int]()  # how many inputs of earlier layers still had their memory when the backward wanted the last one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():  # the checkpoint's own marker has no elements
            kept.append(weakref.ref(tensor))
        return tensor.clone()

    def unpack(copy: torch.Tensor) -> torch.Tensor:
        if copy.numel():
            left.append(sum(each() is not None for each in kept[:-1]))
            kept.clear()
        return copy

    monkeypatch.setattr(
        offloaded_activations,
        "save_on_cpu",
        lambda pin_memory: torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    )
    model_dir = save_model(model_type, **MODELS[model_type])
    plain, _ = train(model_dir, gradient_checkpointing=True)
    assert not left
    offloaded, counts = train(model_dir, gradient_checkpointing=True, offload_activations=True)
    assert counts == {"with gradient": 8, "without": 4, "in training mode": 0}
    assert left == [0] * 4, "two layers of two micro-batches"
    assert all(torch.equal(offloaded[name], gradient) for name, gradient in plain.items())
