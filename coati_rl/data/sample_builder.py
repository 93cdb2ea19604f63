"""Rollout group -> samples: group statistics over the valid responses, then one advantage and one weight a token.

G samples of one prompt. A sample that is filtered still belongs to the statistics of its group; an invalid one (the
scorer could not decide) does not. See `group_rules`.
"""

import numpy as np

from coati_rl.algorithms.advantage import Estimator, group_advantages
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.data.group_rules import GroupRules, is_in_loss, is_valid, over_length_penalties
from coati_rl.data.packing import Sample
from coati_rl.errors import RunError
from coati_rl.types import RolloutGroup


def build_samples(
    group: RolloutGroup, *, rules: GroupRules, loss_variation: LossVariation, estimator: Estimator
) -> list[Sample]:
    """One Sample per response in the loss.

    Raises: RunError if the estimator, which may be a user's, fails.
    """
    in_loss = is_in_loss(group, rules)
    if not in_loss.any():
        return []
    advantages = _advantages(group, rules, estimator)
    prompt = np.asarray(group.prompt.token_ids, dtype=np.int64)
    samples = []
    for index in np.flatnonzero(in_loss):
        completion = group.completions[index]
        length = len(completion.token_ids)
        weight = token_weight(length, loss_variation, max_length=rules.max_new_tokens)
        samples.append(
            Sample(
                uid=group.prompt.uid,
                number=int(index),
                token_ids=_behind(prompt, length, completion.token_ids, prompt, np.int64),
                loss_mask=_behind(prompt, length, True, False, np.bool_),
                loss_weights=_behind(prompt, length, weight, 0.0, np.float32),
                advantages=_behind(prompt, length, advantages[index], 0.0, np.float32),
                rollout_logprobs=_behind(prompt, length, completion.logprobs, 0.0, np.float32),
                temperature=_behind(prompt, length, group.temperature, 1.0, np.float32),
                policy_version=_behind(prompt, length, completion.policy_versions, -1, np.int32),
            )
        )
    return samples


def _advantages(group: RolloutGroup, rules: GroupRules, estimator: Estimator) -> np.ndarray:
    """float64[G], from the rewards with what their length takes off."""
    valid = is_valid(group)
    rewards = np.array([score.reward for score in group.scores], dtype=np.float64) + over_length_penalties(group, rules)
    try:
        return group_advantages(rewards, valid, estimator=estimator)
    except Exception as error:
        raise RunError(
            f"--advantage-estimator fails on prompt {group.prompt.uid} with rewards {rewards[valid].tolist()}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _behind(
    prompt: np.ndarray, length: int, response: np.ndarray | float, fill: np.ndarray | float, dtype: type
) -> np.ndarray:
    """`length` values of the response behind `fill` on every prompt token."""
    values: np.ndarray = np.empty(len(prompt) + length, dtype=dtype)
    values[: len(prompt)], values[len(prompt) :] = fill, response
    return values
