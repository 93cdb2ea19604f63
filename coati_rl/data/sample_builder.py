"""Rollout group -> samples: group statistics over the valid responses, then one advantage and one weight a token.

G samples of one prompt. An invalid sample (the scorer could not decide) is left out of statistics and loss.
"""

import math

import numpy as np

from coati_rl.algorithms.advantage import grpo_advantages
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.data.packing import Sample
from coati_rl.types import RolloutGroup, Score


def is_trainable(group: RolloutGroup) -> np.ndarray:
    """bool[G]: responses with a finite reward and at least one token."""
    pairs = zip(group.completions, group.scores, strict=True)
    return np.array([_is_scored(score) and len(completion.token_ids) > 0 for completion, score in pairs])


def _is_scored(score: Score) -> bool:
    return score.verdict != "invalid" and math.isfinite(score.reward)


def build_samples(group: RolloutGroup, *, loss_variation: LossVariation) -> list[Sample]:
    """One Sample per trainable response of the group."""
    valid = is_trainable(group)
    rewards = np.array([score.reward for score in group.scores], dtype=np.float64)
    advantages = grpo_advantages(rewards, valid)
    prompt = np.asarray(group.prompt.token_ids, dtype=np.int64)
    samples = []
    for index in np.flatnonzero(valid):
        completion = group.completions[index]
        length = len(completion.token_ids)
        weight = token_weight(length, loss_variation)
        samples.append(
            Sample(
                uid=group.prompt.uid,
                number=int(index),
                token_ids=np.concatenate([prompt, completion.token_ids.astype(np.int64)]),
                loss_mask=_after(prompt, np.ones(length, dtype=bool), False),
                loss_weights=_after(prompt, np.full(length, weight, dtype=np.float32), 0.0),
                advantages=_after(prompt, np.full(length, advantages[index], dtype=np.float32), 0.0),
                rollout_logprobs=_after(prompt, completion.logprobs.astype(np.float32), 0.0),
                temperature=_after(prompt, np.full(length, group.temperature, dtype=np.float32), 1.0),
                policy_version=_after(prompt, completion.policy_versions.astype(np.int32), -1),
            )
        )
    return samples


def _after(prompt: np.ndarray, response: np.ndarray, fill: float) -> np.ndarray:
    """The response's values behind `fill` on every prompt token."""
    return np.concatenate([np.full(len(prompt), fill, dtype=response.dtype), response])
