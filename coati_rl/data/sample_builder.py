"""Rollout group -> samples: group statistics over the valid responses, then an advantage and a token weight for each.

G samples of one prompt. A sample that is filtered still belongs to the statistics of its group; an invalid one (the
scorer could not decide) does not. See `group_rules`.
"""

import numpy as np

from coati_rl.algorithms.advantage import Estimator, group_advantages
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.data.group_rules import GroupRules, is_in_loss, is_valid, over_length_penalties
from coati_rl.data.ragged import Sample
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
    prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
    samples = []
    for index in np.flatnonzero(in_loss):
        completion = group.completions[index]
        length = len(completion.token_ids)
        samples.append(
            Sample(
                uid=group.prompt.uid,
                number=int(index),
                prefix_ids=prompt_ids,
                token_ids=completion.token_ids,
                loss_mask=np.ones(length, dtype=bool),
                arrays={
                    "loss_weights": token_weight(length, loss_variation, max_length=rules.max_new_tokens),
                    "advantages": float(advantages[index]),
                    "rollout_logprobs": completion.logprobs,
                    "temperature": group.temperature,
                    "policy_version": completion.policy_versions,
                },
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
