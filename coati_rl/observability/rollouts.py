"""Write rollouts as JSONL: <directory>/steps-000001-000100.jsonl, one line a trajectory, trained or not.

With the detail "full", config.yaml and the weights that the step began with, the lines of a step hold all inputs of its
loss (docs/rollouts.md).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from coati_rl.batching.group_rules import has_usable_baseline
from coati_rl.disk import disk_errors
from coati_rl.observability.records import conversation_fields, score_fields, shown_truth, without_conversations
from coati_rl.observability.step_files import delete_before, step_file, steps_in
from coati_rl.routes import routes_as_json
from coati_rl.run_lengths import encode_runs
from coati_rl.types import DEFAULT_TASK, RolloutDetail, RolloutGroup, Trajectory

NO_IDENTITIES: Mapping[int, str] = MappingProxyType({})


class RolloutRecorder:
    """Append the groups of each optimizer step."""

    def __init__(self, directory: Path, detail: RolloutDetail = "full", *, keep: int | None = None) -> None:
        """Take the directory, and the steps that are kept at least, in files of 100; None: all.

        The detail "full" adds token ids, log-probabilities and policy versions to the text.
        """
        self._directory, self._keep = directory, keep
        self._is_full = detail == "full"
        last = max(_files(directory), default=None)
        self.end: tuple[str, int] = ("", 0) if last is None else (last.name, last.stat().st_size)

    def write(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        *,
        advantages: Mapping[tuple[str, int], float],
        identities: Mapping[int, str] = NO_IDENTITIES,
    ) -> None:
        """Record the groups received for an optimizer step.

        Args:
            step: from 1.
            groups: trained or not.
            advantages: of the trajectories in the loss, by prompt uid and number in the group.
            identities: of weights, by policy version.
        Raises: RunError if the file cannot be written.
        """
        path = step_file(self._directory, step)
        with disk_errors(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            # Half of a surrogate pair, from an environment or an agent, becomes its JSON escape.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                for group in groups:
                    numbers = range(len(group.trajectories))
                    file.writelines(self._line(step, group, number, advantages, identities) for number in numbers)
            self.end = (path.name, path.stat().st_size)
            delete_before(self._directory, step, keep=self._keep)

    def cut(self, end: tuple[str, int]) -> None:
        """Remove what was written after `end`, which was this recorder's, or another one's in the same directory.

        Raises: RunError if a file cannot be changed.
        """
        name, size = self.end = end
        with disk_errors(self._directory):
            for path in _files(self._directory):
                if path.name > name:
                    path.unlink()
                elif path.name == name:
                    os.truncate(path, size)

    def _line(
        self,
        step: int,
        group: RolloutGroup,
        number: int,
        advantages: Mapping[tuple[str, int], float],
        identities: Mapping[int, str],
    ) -> str:
        trajectory, advantage = group.trajectories[number], advantages.get((group.prompt.uid, number))
        versions = trajectory.policy_versions
        record = {
            "step": step,
            "uid": group.prompt.uid,
            **({} if group.prompt.task == DEFAULT_TASK else {"task": group.prompt.task}),
            "sample": number,
            "episode": trajectory.episode,
            "producer": group.producer_id,
            "prompt": group.prompt.text,
            "gt_answer": shown_truth(group.prompt.ground_truth),
            "response": trajectory.text,
            "num_tokens": trajectory.num_loss_tokens,
            "finish_reason": trajectory.finish_reason,
            "temperature": group.temperature,
            **_version_fields(versions, identities),
            **score_fields(group.scores[trajectory.episode]),
            "is_trained": advantage is not None,
            "advantage": advantage,
            **_baseline_field(group),
            **_environment_fields(group, number),
        }
        if not self._is_full:
            return json.dumps(record, ensure_ascii=False) + "\n"
        start = trajectory.turns[0].start
        record |= _token_fields(trajectory, start)
        logprobs = _as_json(_spread(trajectory.logprobs, trajectory.loss_mask[start:], 0.0))
        return f'{json.dumps(record, ensure_ascii=False)[:-1]}, "rollout_logprobs": {logprobs}}}\n'


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("steps-*.jsonl") if steps_in(path) is not None]


def _version_fields(versions: np.ndarray, identities: Mapping[int, str]) -> dict[str, Any]:
    """Return the lowest and highest version that sampled a trajectory, and the identities of their weights."""
    ends = [int(versions.min()), int(versions.max())] if len(versions) else []
    weights = {} if identities.keys().isdisjoint(ends) else {"weights": [identities.get(version) for version in ends]}
    return {"policy_versions": ends, **weights}


def _baseline_field(group: RolloutGroup) -> dict[str, float | None]:
    """Return the reward of the greedy answer to the prompt, as scored, if there is one; null if it has none."""
    if group.baseline is None:
        return {}
    score = group.baseline.score
    return {"baseline_reward": score.reward if has_usable_baseline(group) else None}


def _environment_fields(group: RolloutGroup, number: int) -> dict[str, Any]:
    """Return the conversation of an environment's trajectory, and what it noted about the episode.

    The latter is in the line of the episode's last trajectory, whose text is scored.
    """
    if not group.records:
        return {}
    episode = group.trajectories[number].episode
    earlier, later = (
        [each.episode for each in part] for part in (group.trajectories[:number], group.trajectories[number + 1 :])
    )
    record = group.records[episode]
    noted = {} if episode in later else {"environment": without_conversations(record)}
    return {**conversation_fields(record, earlier.count(episode)), **noted}


def _token_fields(trajectory: Trajectory, start: int) -> dict[str, Any]:
    """Return a trajectory's fields except its log-probabilities; `start` is its first turn's, where the prompt ends."""
    mask = trajectory.loss_mask[start:]
    fields: dict[str, Any] = {
        "prompt_token_ids": trajectory.token_ids[:start].tolist(),
        "token_ids": trajectory.token_ids[start:].tolist(),
        "token_versions": encode_runs(_spread(trajectory.policy_versions, mask, -1)),
        "turns": [[turn.start - start, turn.end - start, turn.finish_reason] for turn in trajectory.turns],
    }
    if not mask.all():
        fields["loss_mask"] = encode_runs(mask)
    if len(temperatures := encode_runs(trajectory.temperature)) > 1:
        fields["token_temperatures"] = temperatures
    if trajectory.prefix.parent is not None:
        fields |= {"parent_sample": trajectory.prefix.parent, "num_shared_tokens": trajectory.prefix.num_tokens}
    if trajectory.routes is not None:
        fields["routes"] = routes_as_json(trajectory.routes)
    if trajectory.rewards:
        fields["token_rewards"] = [[each.position - start, each.name, each.value] for each in trajectory.rewards]
    return fields


def _spread(values: np.ndarray, mask: np.ndarray, fill: float) -> np.ndarray:
    """Scatter values of the tokens in the loss to all tokens of a mask; `fill` elsewhere."""
    spread = np.full(len(mask), fill, dtype=values.dtype)
    spread[mask] = values
    return spread


def _as_json(values: np.ndarray) -> str:
    """Format float32[T] as a JSON list with nine digits, from which the same float32 values are read.

    `json` itself would write the 17 digits of a float64, in three times the time.
    """
    forms = ["%.9g" if is_finite else "null%.0s" for is_finite in np.isfinite(values)]  # JSON has no NaN
    return f"[{', '.join(forms)}]" % tuple(values.tolist())
