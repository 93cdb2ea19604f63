"""Build the samples of a rollout group: statistics over the valid episodes, then one sample per trajectory.

G episodes of one prompt. All forks of an episode have its advantage and its token weight, so that the episode counts
once, however many forks it has. A filtered episode counts in the statistics of its group; an invalid one (the scorer
could not decide) does not. See `group_rules`.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.algorithms.advantage import Estimator, Rewards, decoupled_advantages, group_advantages
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.algorithms.reward_scaling import RewardScaling
from coati_rl.data.episodes import episode_tokens
from coati_rl.data.group_rules import GroupRules, is_in_loss, is_valid, over_length_penalties
from coati_rl.errors import RunError
from coati_rl.samples import Sample
from coati_rl.types import RolloutGroup, Trajectory


def build_samples(
    group: RolloutGroup,
    *,
    rules: GroupRules,
    loss_variation: LossVariation,
    estimator: Estimator,
    scaling: RewardScaling | None = None,
) -> list[Sample]:
    """Build one Sample per trajectory in the loss, in order.

    Args:
        group: scored.
        rules: of the run.
        loss_variation: weighs the tokens.
        estimator: of advantages.
        scaling: of the rewards, before that; None: there is none.
    Raises: RunError if the estimator, which may be a user's, fails.
    """
    in_loss = is_in_loss(group, rules)
    if not in_loss.any():
        return []
    advantages = _advantages(group, rules, estimator, scaling or RewardScaling())
    weights = token_weights(group, in_loss, loss_variation=loss_variation, max_length=rules.max_new_tokens)
    prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
    samples = []
    for index, each in enumerate(group.trajectories):
        if in_loss[each.episode] and each.num_loss_tokens:
            weight, advantage = float(weights[each.episode]), float(advantages[each.episode])
            samples.append(_sample(group, index, prompt_ids, loss_weight=weight, advantage=advantage))
    return samples


def token_weights(
    group: RolloutGroup, in_loss: np.ndarray, *, loss_variation: LossVariation, max_length: int
) -> np.ndarray:
    """Return float64[G], the weight of each token of an episode, by the tokens of all its forks; 0 outside the loss.

    Args:
        in_loss: bool[G], of episodes with at least one token.
        max_length: tokens that an episode may sample.
    """
    weights = np.zeros(len(group.scores))
    for episode, num_tokens in enumerate(episode_tokens(group).tolist()):
        if in_loss[episode]:
            weights[episode] = token_weight(num_tokens, loss_variation, max_length=max_length)
    return weights


def count_episodes(group: RolloutGroup, samples: Sequence[Sample]) -> int:
    """Count the episodes of a group that have a sample: the denominator of a mean over samples."""
    return len({group.trajectories[sample.number].episode for sample in samples})


def _sample(group: RolloutGroup, index: int, prompt_ids: np.ndarray, *, loss_weight: float, advantage: float) -> Sample:
    """Build a trajectory's sample; the prompt's tokens are one object in all samples that begin with it."""
    trajectory = group.trajectories[index]
    start = _num_prompt_tokens(group, trajectory)
    temperature = trajectory.temperature
    return Sample(
        uid=group.prompt.uid,
        number=index,
        prefix_ids=prompt_ids if start == len(prompt_ids) else trajectory.token_ids[:start],
        token_ids=trajectory.token_ids[start:],
        loss_mask=trajectory.loss_mask[start:],
        arrays={
            "loss_weights": loss_weight,
            "advantages": advantage,
            "rollout_logprobs": trajectory.logprobs,
            "temperature": float(temperature[0]) if (temperature == temperature[0]).all() else temperature,
            "policy_version": trajectory.policy_versions,
        },
    )


def _num_prompt_tokens(group: RolloutGroup, trajectory: Trajectory) -> int:
    """Count the tokens of the group's prompt that a trajectory begins with, directly or through its parents."""
    prefix = trajectory.prefix
    num_tokens = prefix.num_tokens
    while prefix.parent is not None:
        prefix = group.trajectories[prefix.parent].prefix
        num_tokens = min(num_tokens, prefix.num_tokens)
    return num_tokens


def group_rewards(group: RolloutGroup) -> Rewards:
    """Return float64[G], the reward of each episode, as it was recorded."""
    return np.array([score.reward for score in group.scores], dtype=np.float64)


def _advantages(group: RolloutGroup, rules: GroupRules, estimator: Estimator, scaling: RewardScaling) -> np.ndarray:
    """Return float64[G], from the scaled rewards plus length penalties; with GDPO from each reward by itself."""
    valid = is_valid(group)
    weights = rules.decoupled_weights.get(group.prompt.task)
    if weights:
        return decoupled_advantages(_rewards_by_name(group, valid, [*weights]), valid, weights=[*weights.values()])
    rewards = scaling(group_rewards(group)) + over_length_penalties(group, rules)
    try:
        return group_advantages(rewards, valid, estimator=estimator)
    except Exception as error:
        raise RunError(
            f"--advantage-estimator fails on prompt {group.prompt.uid} with rewards {rewards[valid].tolist()}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _rewards_by_name(group: RolloutGroup, valid: np.ndarray, names: Sequence[str]) -> Rewards:
    """Return float64[G, K] of the rewards with these names, 0 on invalid episodes."""
    rewards = np.zeros((len(group.scores), len(names)), dtype=np.float64)
    for episode in np.flatnonzero(valid).tolist():
        breakdown = group.scores[episode].breakdown
        if missing := [name for name in names if name not in breakdown]:
            raise RunError(
                f"--advantage-estimator gdpo: a response to prompt {group.prompt.uid} has no reward {missing[0]!r}"
            )
        rewards[episode] = [breakdown[name] for name in names]
    return rewards
