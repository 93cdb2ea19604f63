"""Sum up the records of finished prompts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coati_rl.algorithms.pass_at_k import sampled_accuracy


def summarise(records: Sequence[Mapping[str, Any]], *, group_size: int, is_scored: bool) -> dict[str, Any]:
    """Return the figures of all prompts; a failed prompt counts as G samples that are not correct.

    Args:
        records: one of each prompt, at least one, as `group_record` makes them or with "error".
        group_size: G, samples of a prompt.
        is_scored: there are rewards.
    Returns: JSON; rewards are over samples with a verdict, null without one.
    """
    answered = [record for record in records if "error" not in record]
    num_samples = sum(record["num_samples"] for record in answered)
    figures: dict[str, Any] = {
        "num_prompts": len(records),
        "num_failed": len(records) - len(answered),
        "num_samples": num_samples,
        "num_rows": sum(record["num_rows"] for record in records),
        "num_response_tokens": sum(record["num_tokens"] for record in answered),
        "truncated_fraction": _mean(sum(record["num_truncated"] for record in answered), num_samples),
    }
    if not is_scored:
        return figures
    num_correct = [record.get("num_correct", 0) for record in records]
    num_invalid = sum(record["num_invalid"] for record in answered)
    best = [record["reward_max"] for record in answered if record["reward_max"] is not None]
    figures |= {
        "num_invalid": num_invalid,
        "reward_mean": _mean(math.fsum(record["reward_sum"] for record in answered), num_samples - num_invalid),
        "best_reward_mean": _mean(math.fsum(best), len(best)),
        "accuracy": sum(num_correct) / (len(records) * group_size),
    }
    return figures | (sampled_accuracy(num_correct, group_size) if group_size > 1 else {})


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None
