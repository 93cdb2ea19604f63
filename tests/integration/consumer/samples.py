"""The samples of an optimizer step, and the ways to cut them into micro-batches.

The samples are the experiment; everything that cuts them is only how it is executed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_rl.algorithms.aggregation import LossVariation, loss_scale, token_weight
from coati_rl.batch import MicroBatch, MiniBatch
from tests.integration.consumer.conftest import VOCAB_SIZE
from tests.micro_batches import grid_micro_batch

MAX_RESPONSE = 25  # tokens that a response may have, of which "constant" aggregation makes its denominator


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and its response; per-token numbers are those of the response."""

    token_ids: np.ndarray  # int64[T]
    num_prompt: int
    advantage: float
    temperature: float
    rollout_logprobs: np.ndarray  # float32[T - num_prompt]
    old_logprobs: np.ndarray | None = None  # the same; None: rollout_logprobs stand in

    @property
    def num_response(self) -> int:
        return len(self.token_ids) - self.num_prompt


def make_samples(step: int) -> list[Sample]:
    """Eight samples of 6 to 30 tokens, others in each step, from a policy that knows nothing."""
    rng = np.random.default_rng(100 + step)
    samples = []
    for _ in range(8):
        num_prompt, num_response = int(rng.integers(3, 8)), int(rng.integers(3, 23))
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB_SIZE, num_prompt + num_response),
                num_prompt=num_prompt,
                advantage=float(rng.normal()),
                temperature=float(rng.uniform(0.7, 1.3)),
                rollout_logprobs=(-np.log(VOCAB_SIZE) + 0.3 * rng.normal(size=num_response)).astype(np.float32),
            )
        )
    return samples


@functools.cache
def samples_near(model_dir: Path, step: int, *, recomputes_old: bool = False) -> tuple[Sample, ...]:
    """The same samples from policies near to a model, at distances at which no rounding error decides.

    Log-ratios of tokens are 0, 0.05 or 0.5 away from a sample's mean, which is -0.6, 0 or 0.6: bounds of token ratios
    and of sequence ratios both have some on either side, and none within 0.1.

    Args:
        recomputes_old: the trainer's old policy is at that distance, and the engine's at twice such a one from it;
            else it is the engine's that the ratios are formed with.
    """
    # With other seeds bfloat16 was up to 3.1e-2 from float32, in the biases of keys alone. Their gradient nearly
    # cancels: attention does not see what all keys have in common, except through rotary positions.
    rng = np.random.default_rng(900 + step)
    model, samples = plain_model(model_dir), make_samples(step)
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
    """For all who do not change it."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


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
    """One row per list of samples, padded to the longest row."""
    shape = (len(rows), max(sum(len(s.token_ids) for s in row) for row in rows))
    ints = {name: np.zeros(shape, dtype=np.int64) for name in ("token_ids", "position_ids")}
    names = ["loss_weights", "advantages", "rollout_logprobs"]
    names += [] if rows[0][0].old_logprobs is None else ["old_logprobs"]
    floats = {name: np.zeros(shape, dtype=np.float32) for name in names}
    sample_index, loss_mask = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=bool)
    temperature, version = np.ones(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int32)
    numbers = iter(range(sum(map(len, rows))))
    for r, row in enumerate(rows):
        begin = 0
        for sample in row:
            end = begin + len(sample.token_ids)
            ints["token_ids"][r, begin:end] = sample.token_ids
            ints["position_ids"][r, begin:end] = np.arange(end - begin)
            sample_index[r, begin:end] = next(numbers)
            response = (r, slice(begin + sample.num_prompt, end))
            loss_mask[response] = True
            floats["loss_weights"][response] = token_weight(sample.num_response, aggregation, max_length=MAX_RESPONSE)
            floats["advantages"][response] = sample.advantage
            for name in names[2:]:
                floats[name][response] = getattr(sample, name)
            temperature[response] = sample.temperature
            version[response] = 0
            begin = end
        ints["position_ids"][r, begin:] = np.arange(shape[1] - begin)
    return grid_micro_batch(
        **ints,
        **floats,
        sample_index=sample_index,
        loss_mask=loss_mask,
        temperature=temperature,
        policy_version=version,
    )


def cut(
    samples: Sequence[Sample], *, per_micro_batch: int, packed: bool, aggregation: LossVariation = "sample_level"
) -> tuple[MicroBatch, ...]:
    """Micro-batches of so many samples: in one row, or one per row."""
    groups = [samples[i : i + per_micro_batch] for i in range(0, len(samples), per_micro_batch)]
    rows = [[group] if packed else [[sample] for sample in group] for group in groups]
    return tuple(to_micro_batch(each, aggregation=aggregation) for each in rows)


def scale_of(samples: Sequence[Sample], aggregation: LossVariation = "sample_level") -> float:
    """What turns the weighted sum over a step's samples into its loss."""
    return loss_scale(len(samples), sum(sample.num_response for sample in samples), aggregation)


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
