"""Compute the gradient tests' reference results, without rows, micro-batches or ranks.

Plain transformers, one sample at a time, full logits, the plain formula of a loss, torch's own clipping and AdamW.
"""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.algorithms.aggregation import LossVariation
from tests.integration.consumer.conftest import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_STEPS,
    WEIGHT_DECAY,
    decay_groups,
    reference_of,
)
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.losses import Formula, Response
from tests.integration.consumer.preference_losses import StepFormula
from tests.integration.consumer.samples import (
    MAX_RESPONSE,
    Sample,
    plain_model,
    sample_log_softmax,
    sample_logprobs,
    samples_near,
)


class PlainSteps:
    """Optimizer steps with a loss, each taken when it is first asked for: loss, gradient, weights."""

    def __init__(self, steps: Iterator[dict[str, Any]]) -> None:
        self._steps = steps
        self._taken: list[dict[str, Any]] = []

    def __getitem__(self, step: int) -> dict[str, Any]:
        while len(self._taken) <= step:
            self._taken.append(next(self._steps))
        return self._taken[step]


@functools.cache
def plain_steps(model_dir: Path, loss: str, precision: str = "fp32") -> PlainSteps:
    case = CASES[loss]
    return PlainSteps(
        plain_training(model_dir, precision, case.formula, case.aggregation, case.recomputes_old, case.kind, case.unit)
    )


def plain_training(
    model_dir: Path,
    precision: str,
    formula: Formula | StepFormula,
    aggregation: LossVariation,
    recomputes_old: bool,
    kind: str,
    unit: int,
) -> Iterator[dict[str, Any]]:
    """In float32; with "bf16" the weights that are computed with are rounded to bfloat16, as those of a trainer are."""
    masters = copy.deepcopy(plain_model(model_dir))
    model = copy.deepcopy(masters)
    optimizer = torch.optim.AdamW(decay_groups(masters), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for step in range(NUM_STEPS):
        samples = samples_near(model_dir, step, recomputes_old=recomputes_old, kind=kind)
        ref_logprobs = ref_logprobs_of(model_dir, step, kind)
        with key_bias_terms(model) as squares:
            loss, gradients = plain_gradients(model, samples, ref_logprobs, formula, aggregation, unit)
        for name, master in masters.named_parameters():
            master.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master.bfloat16() if precision == "bf16" else master)
        stepped = {name: p.detach().clone() for name, p in masters.named_parameters()}
        scales = {name: gradient.norm().item() for name, gradient in gradients.items()}
        scales |= {name: total**0.5 for name, total in squares.items()} if precision == "bf16" else {}
        yield {"loss": loss, "gradients": gradients, "scales": scales, "masters": stepped}


@contextmanager
def key_bias_terms(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Collect the sum over tokens of the squared norm of what each token adds to the gradient of a key bias, by name.

    Attention does not see what all keys have in common, except through rotary positions, so these terms nearly cancel:
    the root of the sum is up to 6 times the norm of the gradient. Rounding is a fraction of the terms, not of what is
    left of them.
    """
    squares: dict[str, float] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("k_proj") and module.bias is not None:

            def add(module: Any, inputs: Any, outputs: tuple[Tensor, ...], name: str = f"{name}.bias") -> None:
                squares[name] = squares.get(name, 0.0) + outputs[0].square().sum().item()

            handles.append(module.register_full_backward_hook(add))
    yield squares
    for handle in handles:
        handle.remove()


def plain_gradients(
    model: PreTrainedModel,
    samples: tuple[Sample, ...],
    ref_logprobs: tuple[Tensor, ...],
    formula: Any,
    aggregation: LossVariation,
    unit: int,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradient; the formula is of a response, or of all if they are in units."""
    if unit > 1:
        pairs = zip(samples, ref_logprobs, strict=True)
        loss = formula([Response(sample, sample_log_softmax(model, sample), ref) for sample, ref in pairs])
        loss.backward()
        return loss.item(), _take_gradients(model)
    num_tokens = sum(sample.num_counted for sample in samples)
    denominators = {"token_level": num_tokens, "constant": len(samples) * MAX_RESPONSE}
    total = 0.0
    for sample, ref in zip(samples, ref_logprobs, strict=True):
        terms = formula(Response(sample, sample_log_softmax(model, sample), ref))[torch.from_numpy(sample.counted)]
        loss = terms.mean() / len(samples) if aggregation == "sample_level" else terms.sum() / denominators[aggregation]
        loss.backward()
        total += loss.item()
    return total, _take_gradients(model)


def _take_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


@functools.cache
@torch.no_grad()
def ref_logprobs_of(model_dir: Path, step: int, kind: str = "plain") -> tuple[Tensor, ...]:
    """float32[T] of each sample of a step, from the model's reference."""
    reference = plain_model(reference_of(model_dir))
    return tuple(sample_logprobs(reference, sample) for sample in samples_near(model_dir, step, kind=kind))
