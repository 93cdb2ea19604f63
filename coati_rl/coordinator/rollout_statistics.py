"""Compute the rollout statistics of an optimizer step, by the names of metrics.jsonl.

Rewards and accuracies are over all groups received for the step: over the trained ones alone they would show prompts
of medium difficulty only. Staleness is over the step's own groups. If rewards have several parts, each has its own
mean, `reward/<name>`, and so has each metric of environments, `agent/<name>_mean`. If prompts are of several tasks,
each has its own `OF_A_TASK`, `<key>/<task>`. A sample is an episode; its length counts all tokens sampled in it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from coati_rl.batching.episodes import context_tokens, episode_tokens, is_truncated
from coati_rl.batching.group_rules import GroupRules, has_usable_baseline, is_in_loss, is_valid, over_length_penalties
from coati_rl.batching.packed_group import as_packed, group_arrays
from coati_rl.types import RolloutGroup

# Reported for each task as well, if there are several; None if no group of the task was received for the step.
OF_A_TASK = ("reward_mean", "answer_accuracy", "response_tokens_mean", "truncated_fraction")


def rollout_statistics(
    groups: Sequence[RolloutGroup],
    dropped: Sequence[RolloutGroup],
    *,
    rules: GroupRules,
    staleness: Callable[[int], int],
    tasks: Sequence[str] = (),
) -> dict[str, float | int | None]:
    """Return the rollout fields of a step's record; a mean over valid samples is None if there are none.

    Args:
        groups: the step's own, at least one.
        dropped: since the last step.
        rules: which samples are in the loss, and the length penalty.
        staleness: policy version -> weight syncs since.
        tasks: of the run's prompts, if there are several.
    """
    came_in = [*groups, *dropped]
    statistics = _of_samples(came_in, rules)
    return {
        **statistics,
        "samples_in_loss": sum(int(is_in_loss(group, rules).sum()) for group in groups),
        **_staleness(groups, staleness),
        **_breakdown(came_in),
        **_of_turns(came_in),
        **_of_agents(came_in),
        **_spread(came_in),
        "baseline_reward_mean": _baseline_reward(came_in),
        **_of_tasks(came_in, rules, tasks),
    }


def _spread(came_in: Sequence[RolloutGroup]) -> dict[str, float | int | None]:
    """Return how much rewards and responses differ, by which a signal that is gone or a collapsed policy is noticed."""
    rewards = [_valid_rewards(group) for group in came_in]
    compared = [each for each in rewards if len(each) > 1]
    correct = [each for group in came_in if len(each := _valid_correct(group)) > 1]
    valid = np.concatenate(rewards)
    sampled = [tokens for group in came_in for tokens in _sampled_tokens(group)]
    return {
        "reward_std": _std(valid) if len(valid) else None,
        "constant_group_fraction": float(np.mean([np.ptp(each) == 0 for each in compared])) if compared else None,
        "groups_all_correct": sum(map(all, correct)),
        "groups_all_wrong": sum(not any(each) for each in correct),
        "response_tokens_max": max(map(len, sampled)),
        "distinct_response_fraction": len({tokens.tobytes() for tokens in sampled}) / len(sampled),
    }


def _baseline_reward(came_in: Sequence[RolloutGroup]) -> float | None:
    """Return the mean reward of the greedy answers that were scored; None if there are none."""
    rewards = [group.baseline.score.reward for group in came_in if group.baseline and has_usable_baseline(group)]
    return float(np.mean(rewards)) if rewards else None


def _std(values: np.ndarray) -> float:
    """Return the standard deviation, 0 of equal values: their mean is rounded."""
    return 0.0 if np.ptp(values) == 0 else float(np.std(values))


def _valid_rewards(group: RolloutGroup) -> np.ndarray:
    """Return float64[V], the rewards of the valid samples."""
    rewards = np.array([score.reward for score in group.scores], dtype=np.float64)
    return np.compress(is_valid(group), rewards)


def _valid_correct(group: RolloutGroup) -> list[bool]:
    """Return whether the answer of each valid sample is correct."""
    return [score.answer_correct for score, valid in zip(group.scores, is_valid(group).tolist(), strict=True) if valid]


def _sampled_tokens(group: RolloutGroup) -> list[np.ndarray]:
    """Return the sampled tokens of each episode, over all its turns and forks."""
    arrays, parts = group_arrays(group), [list[np.ndarray]() for _ in group.scores]
    for packed, own in zip(as_packed(group).trajectories, arrays.own, strict=True):
        parts[packed.episode].append(arrays.token_ids[own][arrays.loss_mask[own]])
    return [each[0] if len(each) == 1 else np.concatenate(each) for each in parts]


def _of_tasks(
    came_in: Sequence[RolloutGroup], rules: GroupRules, tasks: Sequence[str]
) -> dict[str, float | int | None]:
    """Return the keys of OF_A_TASK for each task."""
    found: dict[str, float | int | None] = {}
    for task in tasks:
        groups = [group for group in came_in if group.prompt.task == task]
        statistics = _of_samples(groups, rules) if groups else {}
        found |= {f"{key}/{task}": statistics.get(key) for key in OF_A_TASK}
    return found


def _of_samples(came_in: Sequence[RolloutGroup], rules: GroupRules) -> dict[str, float | int | None]:
    """Return what is computed from the samples of groups; at least one group."""
    valid = np.concatenate([is_valid(group) for group in came_in])
    scores = [score for group in came_in for score in group.scores]
    lengths = np.concatenate([episode_tokens(group) for group in came_in])
    is_punished = rules.over_length_cache is not None
    penalties = [each for group in came_in for each in over_length_penalties(group, rules)] if is_punished else []

    def mean_of(values: Sequence[float] | np.ndarray) -> float | None:
        return float(np.mean(np.array(values, dtype=np.float64)[valid])) + 0.0 if valid.any() else None  # no -0.0

    return {
        "reward_mean": mean_of([score.reward for score in scores]),
        "answer_accuracy": mean_of([float(score.answer_correct) for score in scores]),
        "format_accuracy": mean_of([float(score.format_valid) for score in scores]),
        "samples_invalid": int((~valid).sum()),
        "response_tokens_mean": float(lengths.mean()),
        "truncated_fraction": float(np.concatenate([is_truncated(group) for group in came_in]).mean()),
        "over_length_penalty_mean": mean_of(penalties) if is_punished else None,
        "num_prompt_tokens": int(sum(context_tokens(group).sum() for group in came_in)),
        "num_response_tokens": int(lengths.sum()),
    }


def _breakdown(came_in: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean of each named reward over the valid scores that have it."""
    values: dict[str, list[float]] = {}
    for group in came_in:
        for score, is_scored in zip(group.scores, is_valid(group).tolist(), strict=True):
            if score.breakdown and is_scored:
                for name, value in score.breakdown.items():
                    values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(np.array(values[name], dtype=np.float64))) for name in sorted(values)}


def _of_turns(came_in: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return what environments of several turns noted about the episodes; nothing without such."""
    episodes = [record.get("turns", ()) for group in came_in for record in group.records]
    if not episodes:
        return {}
    counts = [sum(turn["role"] == "assistant" for turn in turns) for turns in episodes]
    seconds = [sum(turn.get("environment_seconds", 0.0) for turn in turns) for turns in episodes]
    in_model = [sum(turn.get("seconds", 0.0) for turn in turns) for turns in episodes]
    return {
        "turns_mean": float(np.mean(counts)),
        "environment_s_mean": float(np.mean(seconds)),
        "model_s_mean": float(np.mean(in_model)),
    }


def _of_agents(came_in: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean of each metric that environments gave, over the valid episodes that have it."""
    values: dict[str, list[float]] = {}
    for group in came_in:
        valid = is_valid(group).tolist()
        for record in (record for number, record in enumerate(group.records) if valid[number]):
            for name, value in record.get("metrics", {}).items():
                values.setdefault(f"agent/{name}_mean", []).append(value)
    return {name: float(np.mean(np.array(values[name], dtype=np.float64))) for name in sorted(values)}


def _staleness(groups: Sequence[RolloutGroup], staleness: Callable[[int], int]) -> dict[str, float | int]:
    """Return mean and maximum staleness over tokens, in weight syncs."""
    counts: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in as_packed(group).policy_versions:
            counts[version] += num_tokens
    stale = np.array([staleness(version) for version in counts])
    return {
        "staleness_mean": float(np.average(stale, weights=[*counts.values()])),
        "staleness_max": int(stale.max()),
    }
