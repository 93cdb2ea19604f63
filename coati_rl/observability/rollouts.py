"""Rollouts as JSONL, for people: <directory>/steps-000001-000100.jsonl, one line a sample, trained or not."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coati_rl.disk import disk_errors
from coati_rl.observability.records import score_fields, shown_truth
from coati_rl.types import RolloutGroup

_STEPS_PER_FILE = 100


class RolloutRecorder:
    """Appends the groups of each optimizer step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(
        self, step: int, groups: Sequence[RolloutGroup], *, is_trained: Callable[[RolloutGroup], np.ndarray]
    ) -> None:
        """Record the groups that came in for optimizer step `step` (from 1); `is_trained`: group -> bool[G].

        Raises: RunError if the disk refuses.
        """
        first = (step - 1) // _STEPS_PER_FILE * _STEPS_PER_FILE + 1
        path = self._directory / f"steps-{first:06d}-{first + _STEPS_PER_FILE - 1:06d}.jsonl"
        with disk_errors(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(line for group in groups for line in _lines(step, group, is_trained(group)))


def _lines(step: int, group: RolloutGroup, is_trained: np.ndarray) -> list[str]:
    lines = []
    for index, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True)):
        versions = completion.policy_versions
        record = {
            "step": step,
            "uid": group.prompt.uid,
            "sample": index,
            "producer": group.producer_id,
            "prompt": group.prompt.text,
            "gt_answer": shown_truth(group.prompt.ground_truth),
            "response": completion.text,
            "num_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "policy_versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
            **score_fields(score),
            "is_trained": bool(is_trained[index]),
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines
