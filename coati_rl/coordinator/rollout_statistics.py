"""Sum up the groups of an optimizer step: what its record says of the rollouts, by the names of metrics.jsonl.

How the model does is said of all groups that came in for the step: of the trained ones alone it would be a curve of
prompts of middling difficulty. How old the weights were is said of the step's own groups. Where rewards have several
parts, each has a mean of its own, `reward/<name>`. A sample is an episode; its length counts all that
was sampled in it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from coati_rl.data.episodes import context_tokens, episode_tokens, is_truncated
from coati_rl.data.group_rules import GroupRules, is_in_loss, is_valid, over_length_penalties
from coati_rl.run_lengths import encode_runs
from coati_rl.types import RolloutGroup, Score


def rollout_statistics(
    groups: Sequence[RolloutGroup],
    dropped: Sequence[RolloutGroup],
    *,
    rules: GroupRules,
    staleness: Callable[[int], int],
) -> dict[str, float | int | None]:
    """The rollouts' share of a step's record; a mean over valid samples is None if there are none.

    Args:
        groups: the step's own, at least one.
        dropped: since the last step.
        rules: which samples are in the loss, and whether length is punished.
        staleness: policy version -> weight syncs since.
    """
    came_in = [*groups, *dropped]
    valid = np.concatenate([is_valid(group) for group in came_in])
    scores = [score for group in came_in for score in group.scores]
    lengths = np.concatenate([episode_tokens(group) for group in came_in])
    penalties = np.concatenate([over_length_penalties(group, rules) for group in came_in])

    def mean_of(values: Sequence[float] | np.ndarray) -> float | None:
        return float(np.mean(np.array(values, dtype=np.float64)[valid])) + 0.0 if valid.any() else None  # no -0.0

    return {
        "reward_mean": mean_of([score.reward for score in scores]),
        "answer_accuracy": mean_of([float(score.answer_correct) for score in scores]),
        "format_accuracy": mean_of([float(score.format_valid) for score in scores]),
        "samples_invalid": int((~valid).sum()),
        "samples_in_loss": sum(int(is_in_loss(group, rules).sum()) for group in groups),
        "response_tokens_mean": float(lengths.mean()),
        "truncated_fraction": float(np.concatenate([is_truncated(group) for group in came_in]).mean()),
        "over_length_penalty_mean": None if rules.over_length_cache is None else mean_of(penalties),
        "num_prompt_tokens": int(sum(context_tokens(group).sum() for group in came_in)),
        "num_response_tokens": int(lengths.sum()),
        **_staleness(groups, staleness),
        **_breakdown([score for score, is_scored in zip(scores, valid, strict=True) if is_scored]),
    }


def _breakdown(scores: Sequence[Score]) -> dict[str, float]:
    """The mean of each named reward over the valid scores that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.breakdown.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(np.array(values[name], dtype=np.float64))) for name in sorted(values)}


def _staleness(groups: Sequence[RolloutGroup], staleness: Callable[[int], int]) -> dict[str, float | int]:
    """Over tokens, in weight syncs."""
    counts: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in encode_runs(group.policy_versions):
            counts[version] += num_tokens
    stale = np.array([staleness(version) for version in counts])
    return {
        "staleness_mean": float(np.average(stale, weights=[*counts.values()])),
        "staleness_max": int(stale.max()),
    }
