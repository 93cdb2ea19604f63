"""Build micro-batches: several samples in a row, prompts and gaps between their tokens, NaN or inf in padding."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch
from tests.micro_batches import grid_micro_batch
from tests.unit.algorithms.oracle import VERSION, Floats, Sample

POISON = (math.nan, -math.inf, math.inf, 1e30)
# What is read under the mask alone, so that anything may stand beside it.
POISONED = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
LEAVES = ("logprobs", "entropy")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of the loss, and where in its rows each sample's loss tokens lie."""

    arrays: dict[str, Tensor]
    places: list[tuple[list[int], list[int]]]  # per sample: rows, columns of its T tokens

    def per_sample(self, values: Tensor) -> list[Floats]:
        """The values at each sample's tokens, float64[T] each."""
        return [values[place].detach().double().numpy() for place in self.places]


def lay_out(samples: Sequence[Sample], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Samples in random rows, with 1-2 prompt tokens each, holes between their tokens, and padding."""
    rng = random.Random(seed)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(rng.randint(1, max(1, len(samples))))]  # (sample, token)
    for index, sample in enumerate(samples):
        places = [(index, -1)] * rng.randint(1, 2)
        for token in range(sample.length):
            places += [(index, token)] + [(index, -1)] * rng.choice((0, 0, 0, 1))
        rows[rng.randrange(len(rows))].extend(places)
    shape = (len(rows), max(map(len, rows)) + rng.randint(0, 2))
    poison = torch.tensor(POISON, dtype=dtype)
    batch = {
        name: poison[torch.arange(math.prod(shape)) % len(POISON)].reshape(shape).roll(i)
        for i, name in enumerate(POISONED)
    }
    batch["loss_weights"] = torch.zeros(shape, dtype=dtype)
    batch["loss_mask"] = torch.zeros(shape, dtype=torch.bool)
    batch["sample_index"] = torch.full(shape, -1, dtype=torch.int32)
    batch["policy_version"] = torch.full(shape, -1, dtype=torch.int32)
    batch["trainer_version"] = torch.tensor(VERSION)
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in samples]
    for row, places in enumerate(rows):
        for column, (index, token) in enumerate(places):
            batch["sample_index"][row, column] = index
            if token >= 0:
                found[index][0].append(row)
                found[index][1].append(column)
                batch["loss_mask"][row, column] = True
                for name in (*POISONED, "loss_weights", "policy_version"):
                    batch[name][row, column] = float(getattr(samples[index], name)[token])
    return Batch(arrays=batch, places=found)


def to_micro_batch(batch: Batch) -> MicroBatch:
    """The same in float32, as the trainer is handed it."""
    arrays = {name: array.numpy() for name, array in batch.arrays.items()}
    shape = arrays["loss_mask"].shape
    names = ("loss_weights", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
    return grid_micro_batch(
        token_ids=np.zeros(shape, np.int64),
        position_ids=np.zeros(shape, np.int64),
        temperature=np.ones(shape, np.float32),
        **{name: arrays[name] for name in ("sample_index", "loss_mask", "policy_version")},
        **{name: arrays[name].astype(np.float32) for name in names},
    )


def evaluate(loss: PolicyLoss, arrays: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """(value, report, gradients of log-probabilities and entropies) of a loss."""
    leaves = {name: arrays[name].clone().requires_grad_() for name in LEAVES}
    value, sums = loss(leaves["logprobs"], leaves["entropy"], arrays)
    value.backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }  # the entropies have none without a bonus
    return value.item(), sums, gradients


def numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def random_samples(lengths: Sequence[int] = (3, 1, 2, 4), *, seed: int = 0, spread: float = 0.4) -> list[Sample]:
    """Samples whose log-ratios have the deviation `spread`."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        logprobs = -rng.uniform(0.1, 4, length)
        near = {
            name: logprobs + spread * rng.normal(size=length)
            for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        }
        made.append(
            Sample(
                logprobs=logprobs,
                entropy=rng.uniform(0, 2, length),
                advantages=rng.normal(size=length),
                loss_weights=rng.uniform(0.1, 1, length),
                policy_version=rng.integers(VERSION - 1, VERSION + 1, length).astype(np.int32),
                **near,
            )
        )
    return made


def floats(low: float, high: float, *extremes: float) -> st.SearchStrategy[float]:
    return st.floats(low, high) | st.sampled_from(extremes) if extremes else st.floats(low, high)


@st.composite
def any_samples(draw: st.DrawFn, *, max_samples: int = 4) -> list[Sample]:
    """Up to four samples of one to four tokens; old policy and engine up to e^30 away, the reference up to e^19."""
    made = []
    for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_samples)):

        def tokens(low: float, high: float, *extremes: float, length: int = length) -> Floats:
            return draw(arrays(np.float64, length, elements=floats(low, high, *extremes)))

        logprobs = tokens(-6, 0)
        old_logprobs = logprobs - tokens(-2, 2, 0.0, 30.5, -30.5)
        made.append(
            Sample(
                logprobs=logprobs,
                old_logprobs=old_logprobs,
                rollout_logprobs=old_logprobs - tokens(-2, 2, 0.0, 30.5, -30.5),
                ref_logprobs=logprobs - tokens(-3, 3, 0.0, 19.0, -19.0),
                entropy=tokens(0, 3),
                advantages=tokens(-3, 3, 0.0),
                loss_weights=tokens(0.01, 1),
                policy_version=draw(arrays(np.int32, length, elements=st.integers(VERSION - 1, VERSION))),
            )
        )
    return made
