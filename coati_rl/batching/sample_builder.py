"""Build the samples of a rollout group: statistics over the valid episodes, then one sample per trajectory.

G episodes of one prompt. All forks of an episode have its advantage, or those of its turns, and its token weight, so
that the episode counts once, however many forks it has. A filtered episode counts in the statistics of its group; an
invalid one (the scorer could not decide) does not. See `group_rules`.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.algorithms.advantage import Estimator, Rewards, decoupled_advantages, group_advantages
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.algorithms.reward_scaling import RewardScaling
from coati_rl.algorithms.turn_advantages import turn_advantages
from coati_rl.batching.episodes import episode_tokens
from coati_rl.batching.group_rules import GroupRules, is_in_loss, is_valid, length_penalties, over_length_penalties
from coati_rl.batching.packed_group import PackedTrajectory, as_packed, group_arrays
from coati_rl.batching.turn_rewards import token_rewards, turn_rewards, values_by_token
from coati_rl.errors import RunError
from coati_rl.frozen import unchecked
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
    scaling = scaling or RewardScaling()
    advantages = _advantages(group, rules, estimator, scaling)
    of_tokens = token_rewards(group, _rewards(group, rules, scaling)) if rules.has_token_rewards else None
    weights = token_weights(group, in_loss, loss_variation=loss_variation, max_length=rules.max_new_tokens)
    uid, prompt_ids = group.prompt.uid, np.array(group.prompt.token_ids, dtype=np.int32)
    arrays, samples = group_arrays(group), list[Sample]()
    for index, packed in enumerate(as_packed(group).trajectories):
        episode, counted = packed.episode, arrays.counted[index]
        if not in_loss[episode] or counted.start == counted.stop:
            continue
        if packed.parent is None and packed.num_shared is None:
            own = arrays.own[index]
            prefix_ids, token_ids, loss_mask = prompt_ids, arrays.token_ids[own], arrays.loss_mask[own]
        else:
            prefix_ids, token_ids, loss_mask = _tokens(group, group.trajectories[index], prompt_ids)
        sample = unchecked(  # its arrays are parts of a group's, which was checked
            Sample,
            uid=uid,
            number=index,
            prefix_ids=prefix_ids,  # one object in all samples that begin with the whole prompt
            token_ids=token_ids,
            loss_mask=loss_mask,
            arrays={
                "loss_weights": float(weights[episode]),
                "advantages": _of_tokens(advantages[episode], packed, arrays.loss_mask[arrays.own[index]]),
                "rollout_logprobs": arrays.logprobs[counted],
                "temperature": _one_if_equal(arrays.temperature[counted]),
                "policy_version": arrays.policy_versions[counted],
                **({} if of_tokens is None else _for_critic(of_tokens[index], packed)),
            },
            num_loss_tokens=counted.stop - counted.start,
            routes=group.trajectories[index].routes if as_packed(group).routes is not None else None,
        )
        samples.append(sample)
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
    trajectories = as_packed(group).trajectories
    return len({trajectories[sample.number].episode for sample in samples})


def _tokens(
    group: RolloutGroup, trajectory: Trajectory, prompt_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a trajectory's tokens of the prompt, those after them, and their loss mask."""
    start = _num_prompt_tokens(group, trajectory)
    prefix_ids = prompt_ids if start == len(prompt_ids) else prompt_ids[:start]
    return prefix_ids, trajectory.token_ids[start:], trajectory.loss_mask[start:]


def _for_critic(rewards: np.ndarray, packed: PackedTrajectory) -> dict[str, np.ndarray | float]:
    """Return the rewards of a trajectory's tokens, and whether a limit cut it, which is no end."""
    return {
        "token_rewards": _one_if_equal(rewards),
        "is_cut": float(packed.turns[-1].finish_reason == "length"),
    }


def _of_tokens(advantages: np.ndarray, packed: PackedTrajectory, loss_mask: np.ndarray) -> np.ndarray | float:
    """Return an episode's advantage, or, of several turns [J], that of each token in the loss [N]."""
    if advantages.ndim == 0:
        return float(advantages)
    return _one_if_equal(values_by_token(packed, loss_mask, advantages))


def _one_if_equal(values: np.ndarray) -> np.ndarray | float:
    """Return the value of all entries, of which there is at least one; the array where they differ."""
    return float(values[0]) if values.strides == (0,) or (values == values[0]).all() else values


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
    """Return float64[G], from the scaled rewards plus length penalties; with GDPO from each reward by itself.

    With a discount of turns: float64[G, J], one for each turn.
    """
    valid = is_valid(group)
    weights = rules.decoupled_weights.get(group.prompt.task)
    if weights:
        return decoupled_advantages(_rewards_by_name(group, valid, [*weights]), valid, weights=[*weights.values()])
    rewards = _rewards(group, rules, scaling)
    try:
        if rules.turn_discount is not None:
            by_turn = turn_rewards(group, rewards, valid)
            return turn_advantages(by_turn, discount=rules.turn_discount, estimator=estimator)
        baseline = _baseline(group, rules, scaling)
        return group_advantages(rewards, valid, estimator=estimator, lengths=episode_tokens(group), baseline=baseline)
    except Exception as error:
        raise RunError(
            f"--advantage-estimator fails on prompt {group.prompt.uid} with rewards {rewards[valid].tolist()}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _rewards(group: RolloutGroup, rules: GroupRules, scaling: RewardScaling) -> Rewards:
    """Return float64[G], the scaled rewards plus length penalties."""
    rewards: Rewards = scaling(group_rewards(group)) + over_length_penalties(group, rules)
    return rewards


def _baseline(group: RolloutGroup, rules: GroupRules, scaling: RewardScaling) -> float | None:
    """Return the reward of the greedy answer, scaled and with its length penalty like those of samples."""
    if group.baseline is None:
        return None
    reward = scaling(np.array([group.baseline.score.reward], dtype=np.float64))
    penalty = length_penalties([group.baseline.num_tokens], rules, task=group.prompt.task)
    return float((reward + penalty)[0])


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
