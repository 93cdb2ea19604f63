"""The oracle of the gradient tests: it knows no rows, micro-batches or ranks.

Plain transformers, one sample at a time, full logits, the plain formula of a loss, torch's own clipping and AdamW.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.algorithms.aggregation import LossVariation
from tests.integration.consumer.conftest import LEARNING_RATE, MAX_GRAD_NORM, NUM_STEPS, WEIGHT_DECAY, reference_of
from tests.integration.consumer.losses import LOSSES, Formula, Response
from tests.integration.consumer.samples import (
    MAX_RESPONSE,
    Sample,
    plain_model,
    sample_log_softmax,
    sample_logprobs,
    samples_near,
)

Steps = list[dict[str, Any]]


def plain_steps(model_dir: Path, loss: str, precision: str = "fp32") -> Steps:
    """What two optimizer steps with a loss come to: loss, gradient, its norm, weights."""
    case = LOSSES[loss]
    return plain_training(model_dir, precision, case.formula, case.aggregation, case.recomputes_old, case.kind)


@functools.cache
def plain_training(
    model_dir: Path, precision: str, formula: Formula, aggregation: LossVariation, recomputes_old: bool, kind: str
) -> Steps:
    """In float32; with "bf16" the weights that are computed with are rounded to bfloat16, as those of a trainer are."""
    masters = copy.deepcopy(plain_model(model_dir))
    model = copy.deepcopy(masters)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(NUM_STEPS):
        samples = samples_near(model_dir, step, recomputes_old=recomputes_old, kind=kind)
        ref_logprobs = ref_logprobs_of(model_dir, step, kind)
        loss, gradients = plain_gradients(model, samples, ref_logprobs, formula, aggregation)
        for name, master in masters.named_parameters():
            master.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_GRAD_NORM).item()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master.bfloat16() if precision == "bf16" else master)
        stepped = {name: p.detach().clone() for name, p in masters.named_parameters()}
        steps.append({"loss": loss, "gradients": gradients, "norm": norm, "masters": stepped})
    return steps


def plain_gradients(
    model: PreTrainedModel,
    samples: tuple[Sample, ...],
    ref_logprobs: tuple[Tensor, ...],
    formula: Formula,
    aggregation: LossVariation,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradient."""
    num_tokens = sum(sample.num_counted for sample in samples)
    denominators = {"token_level": num_tokens, "constant": len(samples) * MAX_RESPONSE}
    total = 0.0
    for sample, ref in zip(samples, ref_logprobs, strict=True):
        terms = formula(Response(sample, sample_log_softmax(model, sample), ref))[torch.from_numpy(sample.counted)]
        loss = terms.mean() / len(samples) if aggregation == "sample_level" else terms.sum() / denominators[aggregation]
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return total, gradients


@functools.cache
@torch.no_grad()
def ref_logprobs_of(model_dir: Path, step: int, kind: str = "plain") -> tuple[Tensor, ...]:
    """float32[T] of each sample of a step, from the model's reference."""
    reference = plain_model(reference_of(model_dir))
    return tuple(sample_logprobs(reference, sample) for sample in samples_near(model_dir, step, kind=kind))
