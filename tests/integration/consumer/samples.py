"""Create the samples of an optimizer step, and split them into micro-batches in several ways.

The samples are the experiment; everything that cuts them is only how it is executed.
"""

import dataclasses
import functools
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_rl.algorithms.aggregation import LossVariation, loss_scale, token_weight
from coati_rl.batch import MicroBatch, MiniBatch
from consumer.objectives.kto import DESIRABLE, MISMATCHED, UNDESIRABLE
from tests.integration.consumer.conftest import VOCAB_SIZE

NUM_PROMPT = 9  # tokens
MAX_RESPONSE = 25  # tokens that a response may have, of which "constant" aggregation makes its denominator


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and its response; per-token numbers are those of the response."""

    token_ids: np.ndarray  # int64[T]
    num_prompt: int
    advantage: float | np.ndarray  # float32[T - num_prompt] where turns have their own
    temperature: float
    rollout_logprobs: np.ndarray  # float32[T - num_prompt]
    old_logprobs: np.ndarray | None = None  # the same; None: rollout_logprobs stand in
    num_shared: int = 0  # tokens that are those of the sample before it, all of them prompt here
    loss_mask: np.ndarray | None = None  # bool[T - num_prompt]; None: the loss counts all
    label: float = 0.0  # of an example of KTO

    @property
    def num_response(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def counted(self) -> np.ndarray:
        """bool[T - num_prompt]: tokens that the loss counts."""
        return np.ones(self.num_response, dtype=bool) if self.loss_mask is None else self.loss_mask

    @property
    def num_counted(self) -> int:
        return int(self.counted.sum())


def make_samples(step: int) -> list[Sample]:
    """Two prompts with four samples of 12 to 31 tokens each, others in each step, from a policy that knows nothing."""
    rng = np.random.default_rng(100 + step)
    prompts = np.random.default_rng(500 + step).integers(0, VOCAB_SIZE, (2, NUM_PROMPT))
    samples = []
    for number in range(8):
        num_prompt, num_response = int(rng.integers(3, 8)), int(rng.integers(3, 23))
        samples.append(
            Sample(
                token_ids=np.append(
                    prompts[number // 4], rng.integers(0, VOCAB_SIZE, num_prompt + num_response)[num_prompt:]
                ),
                num_prompt=NUM_PROMPT,
                advantage=float(rng.normal()),
                temperature=float(rng.uniform(0.7, 1.3)),
                rollout_logprobs=(-np.log(VOCAB_SIZE) + 0.3 * rng.normal(size=num_response)).astype(np.float32),
            )
        )
    return samples


def with_holes(samples: Sequence[Sample]) -> list[Sample]:
    """The loss leaves out every third token of a response, as of a tool's answer between two turns."""
    return [dataclasses.replace(s, loss_mask=np.arange(s.num_response) % 3 != 1) for s in samples]


def forked(samples: Sequence[Sample]) -> list[Sample]:
    """Every second sample goes on from the one before: from its prompt, or after up to three tokens of its response.

    What they share is prompt to the second one, so that it counts once.
    """
    forks = list(samples)
    for index in range(1, len(samples), 2):
        before, own = samples[index - 1], samples[index]
        shared = before.token_ids[: before.num_prompt + (index // 2) % 4]
        token_ids = np.concatenate([shared, own.token_ids[own.num_prompt :]])
        forks[index] = dataclasses.replace(own, token_ids=token_ids, num_prompt=len(shared), num_shared=len(shared))
    return forks


def forked_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Forked episodes of two turns with advantages of their own, and a tool's answer, not in the loss, in each turn."""
    return [
        dataclasses.replace(s, advantage=np.where(np.arange(s.num_response) < s.num_response // 2, s.advantage, -0.4))
        for s in forked(with_holes(samples))
    ]


def labelled(samples: Sequence[Sample]) -> list[Sample]:
    """Units of an undesirable or a desirable example in turn and a mismatched completion.

    In this order the KL estimates of steps and models are on both sides of 0, and the terms of the examples do not
    cancel: rounding of their weights would show in the norm.
    """
    labels = (UNDESIRABLE, MISMATCHED, DESIRABLE, MISMATCHED)
    return [dataclasses.replace(samples[number ^ 1], label=labels[number % 4]) for number in range(len(samples))]


KINDS: dict[str, Callable[[Sequence[Sample]], Sequence[Sample]]] = {
    "plain": lambda samples: samples,
    "holes": with_holes,
    "forked": forked,
    "forked turns": forked_turns,
    "labelled": labelled,
}


@functools.cache
def samples_near(
    model_dir: Path, step: int, *, recomputes_old: bool = False, kind: str = "plain"
) -> tuple[Sample, ...]:
    """The same samples from policies near to a model, at distances at which no rounding error decides.

    Log-ratios of tokens are 0, 0.05 or 0.5 away from a sample's mean, which is -0.6, 0 or 0.6: bounds of token ratios
    and of sequence ratios both have some on either side, and none within 0.1.

    Args:
        recomputes_old: the trainer's old policy is at that distance, and the engine's at twice such a one from it;
            else it is the engine's that the ratios are formed with.
        kind: one of KINDS.
    """
    # In a file, since every trainer asks for the same, and running the model for them takes as long as a step.
    file = model_dir.parent / f"{model_dir.name}-samples" / f"{step}-{kind}-{recomputes_old}.pickle"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(_samples_near(model_dir, step, recomputes_old=recomputes_old, kind=kind)))
        part.replace(file)
    return pickle.loads(file.read_bytes())


def _samples_near(model_dir: Path, step: int, *, recomputes_old: bool, kind: str) -> tuple[Sample, ...]:
    rng = np.random.default_rng(900 + step)
    model, samples = plain_model(model_dir), KINDS[kind](make_samples(step))
    with torch.no_grad():
        exact = [sample_logprobs(model, sample).numpy() for sample in samples]
    old = [logprobs - ratios for logprobs, ratios in zip(exact, _log_ratios(rng, samples), strict=True)]
    if not recomputes_old:
        return tuple(_replace(sample, rollout_logprobs=o) for sample, o in zip(samples, old, strict=True))
    rollout = [logprobs - 2 * ratios for logprobs, ratios in zip(old, _log_ratios(rng, samples), strict=True)]
    numbers = zip(samples, old, rollout, strict=True)
    return tuple(_replace(sample, old_logprobs=o, rollout_logprobs=r) for sample, o, r in numbers)


def _log_ratios(rng: np.random.Generator, samples: Sequence[Sample]) -> list[np.ndarray]:
    """float64[T - num_prompt] of each sample, nats."""
    means = rng.permutation([-0.6, -0.6, -0.6, 0.0, 0.0, 0.6, 0.6, 0.6])
    ratios = []
    for mean, sample in zip(means, samples, strict=True):
        half = rng.choice([0.05, 0.5], size=sample.num_response // 2)
        around = np.concatenate([half, -half, np.zeros(sample.num_response % 2)])
        ratios.append(mean + rng.permutation(around))
    return ratios


def _replace(sample: Sample, **logprobs: np.ndarray) -> Sample:
    return dataclasses.replace(sample, **{name: values.astype(np.float32) for name, values in logprobs.items()})


@functools.cache
def plain_model(directory: Path) -> PreTrainedModel:
    """For all who do not change it; experts are computed one after the other."""
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **eager).eval()


def sample_log_softmax(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """float32[T - num_prompt, V] at the response's places: by plain transformers, one sample alone."""
    token_ids = torch.tensor(sample.token_ids)[None]
    logits = model(input_ids=token_ids).logits[0, sample.num_prompt - 1 : -1].float() / sample.temperature
    return torch.log_softmax(logits, dim=-1)


def chosen_logprobs(log_softmax: torch.Tensor, sample: Sample) -> torch.Tensor:
    """float32[T - num_prompt], of the response's tokens."""
    return log_softmax.gather(-1, torch.tensor(sample.token_ids)[sample.num_prompt :, None]).squeeze(-1)


def sample_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """float32[T - num_prompt]: by plain transformers, one sample alone, from whole logits."""
    return chosen_logprobs(sample_log_softmax(model, sample), sample)


def to_micro_batch(rows: Sequence[Sequence[Sample]], *, aggregation: LossVariation = "sample_level") -> MicroBatch:
    """One row per list of samples, padded to the longest row; what a sample shares with its neighbour is there once."""
    laid_out = [_lay_out(row) for row in rows]
    length = max(len(token_ids) for token_ids, _, _ in laid_out)
    num_loss = max(sum(sample.num_counted for sample in row) for row in rows)
    names = ["rollout_logprobs"] + ([] if rows[0][0].old_logprobs is None else ["old_logprobs"])
    token_ids, position_ids = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(2))
    ints = {name: np.zeros((len(rows), num_loss), dtype=np.int64) for name in ("token_ids", "sources")}
    indices = {name: np.full((len(rows), num_loss), -1, dtype=np.int32) for name in ("sample_index", "policy_version")}
    floats = {
        name: np.zeros((len(rows), num_loss), dtype=np.float32)
        for name in ("loss_weights", "advantages", "label", *names)
    }
    temperature, loss_mask = np.ones((len(rows), num_loss), np.float32), np.zeros((len(rows), num_loss), dtype=bool)
    segments: list[tuple[int, int, int, int]] = []
    numbers = iter(range(sum(map(len, rows))))
    for r, (row, (ids, of_row, paths)) in enumerate(zip(rows, laid_out, strict=True)):
        token_ids[r, : len(ids)] = ids
        position_ids[r, len(ids) :] = np.arange(length - len(ids))
        offset = len(segments)
        segments += [(r, start, size, parent if parent < 0 else parent + offset) for start, size, parent in of_row]
        begin = 0
        for sample, path in zip(row, paths, strict=True):
            position_ids[r, path] = np.arange(len(path))
            counted = np.flatnonzero(sample.counted)
            here, places = (r, slice(begin, begin + len(counted))), sample.num_prompt + counted
            ints["token_ids"][here], ints["sources"][here] = sample.token_ids[places], path[places - 1]
            indices["sample_index"][here], indices["policy_version"][here] = next(numbers), 0
            loss_mask[here], temperature[here] = True, sample.temperature
            floats["loss_weights"][here] = token_weight(len(counted), aggregation, max_length=MAX_RESPONSE)
            advantage = np.broadcast_to(sample.advantage, sample.num_response)[counted]
            floats["advantages"][here], floats["label"][here] = advantage, sample.label
            for name in names:
                floats[name][here] = getattr(sample, name)[counted]
            begin += len(counted)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segments=np.array(segments, dtype=np.int32),
        loss_arrays={**ints, **indices, **floats, "temperature": temperature, "loss_mask": loss_mask},
    )


def _lay_out(row: Sequence[Sample]) -> tuple[np.ndarray, list[tuple[int, int, int]], list[np.ndarray]]:
    """(int64[L] tokens of the row; start, length and parent of its segments; int64[T] places of each sample's)."""
    token_ids: list[int] = []
    segments: list[tuple[int, int, int]] = []
    paths: list[np.ndarray] = []
    for index, sample in enumerate(row):
        start, shared = len(token_ids), sample.num_shared
        follows = index > 0 and np.array_equal(row[index - 1].token_ids[:shared], sample.token_ids[:shared])
        if not shared or not follows:
            token_ids += sample.token_ids.tolist()
            segments.append((start, len(sample.token_ids), -1))
            paths.append(np.arange(start, len(token_ids)))
            continue
        first, size, parent = segments.pop()  # of the sample before, which is cut where they part
        segments += [(first, shared, parent), (first + shared, size - shared, len(segments))]
        token_ids += sample.token_ids[shared:].tolist()
        segments.append((start, len(token_ids) - start, len(segments) - 2))
        paths.append(np.concatenate([paths[-1][:shared], np.arange(start, len(token_ids))]))
    return np.array(token_ids), segments, paths


def cut(
    samples: Sequence[Sample], *, per_micro_batch: int, packed: bool, aggregation: LossVariation = "sample_level"
) -> tuple[MicroBatch, ...]:
    """Micro-batches of so many samples: in one row, or one per row."""
    groups = [samples[i : i + per_micro_batch] for i in range(0, len(samples), per_micro_batch)]
    rows = [[group] if packed else [[sample] for sample in group] for group in groups]
    return tuple(to_micro_batch(each, aggregation=aggregation) for each in rows)


def scale_of(samples: Sequence[Sample], aggregation: LossVariation = "sample_level") -> float:
    """Return the factor from the weighted sum over a step's samples to its loss."""
    return loss_scale(len(samples), sum(sample.num_counted for sample in samples), aggregation)


def to_mini_batch(
    micro_batches: Sequence[MicroBatch], *, step: int, is_last: bool = True, scale: float = 1 / 8
) -> MiniBatch:
    return MiniBatch(
        step=step,
        micro_batches=tuple(micro_batches),
        is_last=is_last,
        loss_scale=scale,
        learning_rate_progress=0.0,
    )
