"""Make training samples of completions and their rewards, or of the rows of a dataset."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coati_rl.algorithms.advantage import GAE, group_advantages
from coati_rl.estimator import load_estimator
from coati_rl.preflight.offline_rows import make_samples, read_source_forms
from coati_rl.samples import Sample
from coati_rl.types import Score

if TYPE_CHECKING:
    from coati.trainer import Trainer
    from producer.engine_client import Completion


def advantages(
    rewards: Sequence[float],
    estimator: str = "group_norm",
    *,
    lengths: Sequence[int] | None = None,
    baseline: float | None = None,
) -> list[float]:
    """Return the advantage of each completion of a prompt by its reward.

    Args:
        rewards: of all completions of one prompt; NaN: it could not be scored, and has the advantage 0.
        estimator: as --advantage-estimator.
        lengths: tokens of each completion, which "opo" needs.
        baseline: reward of the greedy completion of the prompt, which "remax" needs; NaN: it could not be scored, and
            all advantages are 0.
    """
    values = np.array(rewards, dtype=np.float64)
    is_valid = ~np.isnan(values) & (baseline is None or not np.isnan(baseline))
    found = group_advantages(
        np.where(is_valid, values, 0.0),
        is_valid,
        estimator=load_estimator(estimator),
        lengths=None if lengths is None else np.array(lengths),
        baseline=baseline,
    )
    return [float(value) for value in found]


def group_samples(
    completions: Sequence["Completion"],
    rewards: Sequence[float | Score],
    estimator: str = "group_norm",
    *,
    baseline: float | None = None,
) -> list[Sample]:
    """Return a sample of each completion of a prompt, with its advantage; none of one that could not be scored.

    Of those the reward is NaN, or the verdict of the score "invalid", as `coati.reward` returns it.
    With "gae" each has its reward at its last token, of which the critic of loss="ppo" makes advantages. With "remax"
    `baseline` is the reward of a greedy completion, which is not among these; if it is NaN there is no sample.
    """
    if baseline is not None and np.isnan(baseline):
        return []
    numbers = [_number(reward) for reward in rewards]
    lengths = [len(one.token_ids) for one in completions] if estimator == "opo" else None
    values = advantages(numbers, estimator, lengths=lengths, baseline=baseline)
    found = [*zip(completions, numbers, values, strict=True)]
    extra = [one.token_rewards(reward) if estimator == GAE else {} for one, reward, _ in found]
    return [one.sample(a, **more) for (one, r, a), more in zip(found, extra, strict=True) if not np.isnan(r)]


def _number(reward: float | Score) -> float:
    if not isinstance(reward, Score):
        return reward
    return math.nan if reward.verdict == "invalid" else reward.reward


def rows(trainer: "Trainer", rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples of rows in a format of the trainer's loss ("sft", "dpo", ...), as its command makes them.

    Raises: ConfigError naming the row, from 1, that has another format.
    """
    config = trainer.offline_config
    numbered = [(f"row {number}", dict(row)) for number, row in enumerate(rows, 1)]
    return [*make_samples(config, read_source_forms(config, [numbered]), trainer.tokenizer, flag="rows").samples]
