"""Make the rows of a prompt's group: every sample, the best one, or a preference pair. Formats: docs/generate.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.batching.episodes import episode_tokens, final_trajectories
from coati_rl.observability.records import score_fields
from coati_rl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Describe which samples of a group are written, and how."""

    is_scored: bool = True
    best_of: bool = False
    pairs: bool = False
    min_reward: float | None = None
    reward_template: str | None = None  # with {input} and {reward}, for the last user message


def make_rows(group: RolloutGroup, selection: Selection) -> list[dict[str, Any]]:
    """Return the rows of a group; none where no sample, or no pair, is good enough.

    A sample without a verdict has no reward: it is neither the best nor part of a pair, and --min-reward leaves it out.
    """
    rewards = [score.reward if score.verdict != "invalid" else math.nan for score in group.scores]
    if selection.pairs:
        return _pair(group, rewards, selection)
    kept = [*range(len(rewards))]
    if selection.best_of:
        kept = _best(rewards)[:1]
    if selection.min_reward is not None:
        kept = [index for index in kept if rewards[index] >= selection.min_reward]  # False for NaN
    if selection.reward_template is not None:
        kept = [index for index in kept if not math.isnan(rewards[index])]
    tokens = episode_tokens(group)
    last = final_trajectories(group.trajectories)
    return [
        {
            "uid": group.prompt.uid,
            "sample": index,
            "messages": [*_context(group, rewards[index], selection), _answer(last[index].text)],
            "response": last[index].text,
            "finish_reason": last[index].finish_reason,
            "num_prompt_tokens": len(group.prompt.token_ids),
            "num_response_tokens": int(tokens[index]),
            **_score(group, index, selection),
        }
        for index in kept
    ]


def group_record(group: RolloutGroup) -> dict[str, Any]:
    """Return the figures of a group, from which those of all prompts are summed up."""
    valid = [score.reward for score in group.scores if score.verdict != "invalid"]
    return {
        "num_samples": len(group.scores),
        "num_correct": sum(score.answer_correct for score in group.scores),
        "num_invalid": len(group.scores) - len(valid),
        "reward_sum": math.fsum(valid),
        "reward_max": max(valid, default=None),
        "num_tokens": int(episode_tokens(group).sum()),
        "num_truncated": sum(each.finish_reason == "length" for each in final_trajectories(group.trajectories)),
    }


def _best(rewards: Sequence[float]) -> list[int]:
    """Return the samples with a reward, the best first; of equal ones the earlier."""
    valid = [index for index, reward in enumerate(rewards) if not math.isnan(reward)]
    return sorted(valid, key=lambda index: -rewards[index])


def _pair(group: RolloutGroup, rewards: Sequence[float], selection: Selection) -> list[dict[str, Any]]:
    """Return the best and the worst sample as one row, unless they are equally good."""
    order = _best(rewards)
    if not order or rewards[order[0]] == rewards[order[-1]]:
        return []
    chosen, rejected = order[0], order[-1]
    if selection.min_reward is not None and rewards[chosen] < selection.min_reward:
        return []
    last = final_trajectories(group.trajectories)
    return [
        {
            "uid": group.prompt.uid,
            "prompt": [*group.prompt.messages],
            "chosen": [_answer(last[chosen].text)],
            "rejected": [_answer(last[rejected].text)],
            "chosen_reward": rewards[chosen],
            "rejected_reward": rewards[rejected],
        }
    ]


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _context(group: RolloutGroup, reward: float, selection: Selection) -> list[dict[str, Any]]:
    """Return the conversation before the answer, with the reward where a template says so."""
    messages = [dict(message) for message in group.prompt.messages]
    if selection.reward_template is not None:
        asked = [message for message in messages if message["role"] == "user"] or messages
        filled = selection.reward_template.replace("{reward}", f"{reward:g}")
        asked[-1]["content"] = filled.replace("{input}", asked[-1]["content"])
    return messages


def _score(group: RolloutGroup, index: int, selection: Selection) -> dict[str, Any]:
    if not selection.is_scored:
        return {}
    return {"gt_answer": group.prompt.ground_truth, **score_fields(group.scores[index])}
