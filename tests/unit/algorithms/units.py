"""Lay out units of two samples with given log-probabilities by the real packing, and evaluate a loss on them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.batching.packing import pack
from coati_rl.samples import Sample
from consumer.objectives.kto import MISMATCHED, Kto
from tests.unit.algorithms.preference_oracle import Completion

LENGTHS = ((4, 1), (7, 2), (5, 5), (1, 6))  # tokens of the two samples of each unit


def random_completions(seed: int, *, lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Completion]:
    """Two for each unit; the reference is 0.3 away in each token, so that sums are on both sides of each other."""
    rng = np.random.default_rng(seed)
    policies = [-rng.uniform(0.05, 3, length) for pair in lengths for length in pair]
    return [Completion(policy, policy + 0.3 * rng.normal(size=len(policy))) for policy in policies]


def samples_of(completions: Sequence[Completion], **arrays: Sequence[float]) -> list[Sample]:
    """Samples with a prompt and a masked token, whose log-probabilities are loss arrays, and those given as numbers."""
    prompt = np.array([1, 2])
    return [
        Sample(
            uid=f"row-{number // 2}",
            number=number % 2,
            prefix_ids=prompt,
            token_ids=np.arange(len(each.policy) + 1) + 10 * number,
            loss_mask=np.arange(len(each.policy) + 1) > 0,
            arrays={
                "logprobs": each.policy,
                "ref_logprobs": each.reference,
                "place": np.full(len(each.policy), number),
                "temperature": 1.0,
                "loss_weights": 1.0,
                **{name: values[number] for name, values in arrays.items()},
            },
        )
        for number, each in enumerate(completions)
    ]


def micro_batches_of(samples: Sequence[Sample], **limits: Any) -> list[MicroBatch]:
    """All ranks' micro-batches; what the mask hides is NaN."""
    parts = pack(samples, unit=2, **{"max_samples": len(samples), **limits})
    poisoned = []
    for part in (each for rank in parts for each in rank):
        mask, arrays = part.loss_arrays["loss_mask"], part.loss_arrays  # of a blank one without logprobs and place
        hidden = {name: np.where(mask, arrays.get(name, 0.0), math.nan) for name in ("logprobs", "ref_logprobs")}
        poisoned.append(part.with_arrays(**{"place": np.zeros(mask.shape), **arrays, **hidden}))
    return poisoned


def evaluate_kto(
    objective: Kto, completions: Sequence[Completion], labels: Sequence[bool], **limits: Any
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """As `evaluate`, with the KL estimate of all micro-batches; every second completion is a mismatched one."""
    numbers = [number for label in labels for number in (float(label), MISMATCHED)]
    parts = micro_batches_of(samples_of(completions, label=numbers), **limits)
    parts = [part.with_arrays(policy_logprobs=part.loss_arrays["logprobs"]) for part in parts]
    done = objective.with_whole_step(parts, lambda sums: {name: total.item() for name, total in sums.items()})
    return evaluate(objective.losses["policy"], list(done))


def tensors_of(micro_batch: MicroBatch) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in micro_batch.loss_arrays.items()}


def evaluate(loss_fn: Any, micro_batches: Sequence[MicroBatch]) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(summed loss, gradient by the tokens of each sample that the loss counts, reported sums)."""
    total, sums = 0.0, dict[str, Tensor]()
    found: dict[int, np.ndarray] = {}
    for micro_batch in micro_batches:
        arrays = tensors_of(micro_batch)
        leaf = arrays["logprobs"].clone().requires_grad_()
        loss, terms = loss_fn(leaf, torch.ones_like(leaf), arrays)
        (gradient,) = torch.autograd.grad(loss, leaf)
        total += loss.item()
        sums = merge_sums(sums, terms)
        mask = arrays["loss_mask"]
        assert not gradient[~mask].any()
        for place in arrays["place"][mask].unique().tolist():
            found[place] = gradient[mask & (arrays["place"] == place)].numpy()
    return total, [found[place] for place in sorted(found)], {name: value.item() for name, value in sums.items()}
