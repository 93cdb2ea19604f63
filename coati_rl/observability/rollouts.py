"""Write rollouts as JSONL: <directory>/steps-000001-000100.jsonl, one line a sample, trained or not.

A line is for people, and with the detail "full" for programs too: together with config.yaml and the weights that the
step began with, the lines of a step hold all that its loss is computed from (docs/rollouts.md).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.disk import disk_errors
from coati_rl.observability.records import score_fields, shown_truth
from coati_rl.types import Completion, RolloutDetail, RolloutGroup

_STEPS_PER_FILE = 100


class RolloutRecorder:
    """Appends the groups of each optimizer step."""

    def __init__(self, directory: Path, detail: RolloutDetail = "full") -> None:
        """`detail`: "full" for token ids, log-probabilities and policy versions beside the text."""
        self._directory = directory
        self._is_full = detail == "full"

    def write(self, step: int, groups: Sequence[RolloutGroup], *, advantages: Mapping[tuple[str, int], float]) -> None:
        """Record the groups that came in for an optimizer step.

        Args:
            step: from 1.
            groups: trained or not.
            advantages: of the samples in the loss, by prompt uid and number in the group.
        Raises: RunError if the disk refuses.
        """
        first = (step - 1) // _STEPS_PER_FILE * _STEPS_PER_FILE + 1
        path = self._directory / f"steps-{first:06d}-{first + _STEPS_PER_FILE - 1:06d}.jsonl"
        with disk_errors(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                for group in groups:
                    file.writelines(self._line(step, group, number, advantages) for number in range(len(group.scores)))

    def _line(self, step: int, group: RolloutGroup, number: int, advantages: Mapping[tuple[str, int], float]) -> str:
        completion, advantage = group.completions[number], advantages.get((group.prompt.uid, number))
        versions = completion.policy_versions
        record = {
            "step": step,
            "uid": group.prompt.uid,
            "sample": number,
            "producer": group.producer_id,
            "prompt": group.prompt.text,
            "gt_answer": shown_truth(group.prompt.ground_truth),
            "response": completion.text,
            "num_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "temperature": group.temperature,
            "policy_versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
            **score_fields(group.scores[number]),
            "is_trained": advantage is not None,
            "advantage": advantage,
        }
        if not self._is_full:
            return json.dumps(record, ensure_ascii=False) + "\n"
        record |= _token_fields(group, completion)
        logprobs = _as_json(completion.logprobs)
        return f'{json.dumps(record, ensure_ascii=False)[:-1]}, "rollout_logprobs": {logprobs}}}\n'


def _token_fields(group: RolloutGroup, completion: Completion) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(group.prompt.token_ids),
        "token_ids": completion.token_ids.tolist(),
        "token_versions": _runs(completion.policy_versions),
    }


def _runs(values: np.ndarray) -> list[list[int]]:
    """Shorten int[T] to [value, how often in a row] pairs."""
    starts = np.flatnonzero(np.append(len(values) > 0, values[1:] != values[:-1]))
    lengths = np.diff(np.append(starts, len(values)))
    return [[int(value), int(length)] for value, length in zip(values[starts], lengths, strict=True)]


def _as_json(values: np.ndarray) -> str:
    """Render float32[T] as a JSON list from which the same float32 values are read: nine digits are enough for that.

    `json` itself would write the 17 digits of a float64, in three times the time.
    """
    forms = ["%.9g" if is_finite else "null%.0s" for is_finite in np.isfinite(values)]  # JSON has no NaN
    return f"[{', '.join(forms)}]" % tuple(values.tolist())
