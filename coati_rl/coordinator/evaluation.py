"""Run evaluation rounds: lease their prompts with priority at one policy version, and collect the answers.

Writes <eval dir>/<set>-step-<N>.jsonl (one line a response) and adds a line per set to <eval dir>/summary.jsonl; their
fields are in docs/metrics.md. Here "task" is an evaluation set. With N samples of a prompt, a prompt that failed counts
as N samples that are not correct, and so does a sample without a verdict.
"""

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from coati_rl.algorithms.pass_at_k import sampled_accuracy
from coati_rl.batching.episodes import final_trajectories
from coati_rl.checkpoint.best import BestCheckpoint
from coati_rl.coordinator.leases import SamplingPlan
from coati_rl.disk import disk_errors
from coati_rl.observability.records import (
    conversation_fields,
    score_fields,
    shown_truth,
    step_of_record,
    without_conversations,
)
from coati_rl.types import Prompt, RolloutGroup, SamplingParams
from coati_rl.work import Wait

_GREEDY = SamplingPlan(group_size=1, sampling=SamplingParams(temperature=0.0))


class EvaluationRounds:
    """Keep at most one round at a time; called under the coordinator's lock, except `write` and `name_best`."""

    KEPT: ClassVar = ("_step", "_last_started", "last_finished", "_num_bytes")

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Prompt]],
        directory: Path,
        *,
        plan: SamplingPlan = _GREEDY,
        best: BestCheckpoint | None = None,
        correct_from: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Prepare rounds.

        Args:
            tasks: the prompts by evaluation set.
            directory: of the files.
            plan: how the prompts are sampled.
            best: names the best checkpoint; None: none is named.
            correct_from: the reward from which an answer is correct, by task, where the reward alone decides.
        """
        self._correct_from = correct_from
        self._tasks = tasks
        self._directory = directory
        self._plan = plan
        self._best = best
        self._pending: deque[Prompt] = deque()
        self._groups: list[RolloutGroup] = []
        self._num_failed: dict[str, int] = {}
        self._step: int | None = None
        self._is_taken = False  # by the writer of its files
        self._last_started = self.last_finished = -1  # steps; -1: none
        self._summary = directory / "summary.jsonl"
        self._num_bytes = _size(self._summary)  # of it, with the last complete round

    @property
    def is_running(self) -> bool:
        """Return True from `start` until the last answer is received and written."""
        return self._step is not None

    @property
    def wait(self) -> Wait:
        """Return the reason for which others wait while a round is running."""
        state = f"{self._num_answered} of {self._num_due} prompts are answered"
        state = "its files are being written" if self._is_taken else state
        return Wait(reason=f"waiting for the evaluation at step {self._step}: {state}")

    @property
    def has_pending(self) -> bool:
        """Return True while prompts of the round wait for a producer."""
        return bool(self._pending)

    def resume(self, step: int, last_finished: int) -> None:
        """Resume at `step`, with the last complete round at `last_finished`, or a later one if the files hold it.

        A round that was running when the checkpoint was written may have been completed since.
        """
        lines = self._summary.read_text(encoding="utf-8").splitlines() if self._summary.is_file() else []
        done = [number for line in lines if (number := step_of_record(line)) is not None and number <= step]
        self._last_started = self.last_finished = max([last_finished, *done])

    def is_due(self, step: int, interval: int | None, *, is_over: bool) -> bool:
        """Return True when steps have passed a multiple of `interval` since the last round, and at the end of the run.

        `interval` None disables evaluation.
        """
        if interval is None or self.is_running or step <= self._last_started:
            return False
        return is_over or step // interval > self._last_started // interval

    def start(self, step: int) -> None:
        """Begin a round with the weights after an optimizer step."""
        self._step = self._last_started = step
        self._pending.extend(prompt for prompts in self._tasks.values() for prompt in prompts)
        self._groups, self._num_failed = [], {}

    def draw(self) -> Prompt | None:
        """Return the next prompt to be leased."""
        return self._pending.popleft() if self._pending else None

    def add(self, group: RolloutGroup) -> None:
        """Add a scored answer."""
        self._groups.append(group)

    def add_failure(self, prompt: Prompt) -> None:
        """Count a prompt whose answer failed as not correct."""
        self._num_failed[prompt.eval_set] = self._num_failed.get(prompt.eval_set, 0) + 1

    def take_if_done(self) -> bool:
        """Return True once, when all answers are received: `write` and then `close` have to be called."""
        if self._step is None or self._is_taken or self._num_answered < self._num_due:
            return False
        self._is_taken = True
        return True

    def write(self) -> list[dict[str, object]]:
        """Write the files of a round that was taken, which no other code changes then; needs no lock.

        Returns: one summary per task. Raises: RunError if a file cannot be written.
        """
        step = self._step or 0
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            summaries = [self._summarise(task, step) for task in self._tasks]
            with self._summary.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(summary) + "\n" for summary in summaries)
        return summaries

    def name_best(self) -> dict[str, Any] | None:
        """Name the best checkpoint by the files, after `write` or when a checkpoint is complete; needs no lock.

        Returns: its record if it is another one than before. Raises: RunError if it cannot be written.
        """
        return None if self._best is None else self._best.update()

    def close(self) -> None:
        """End a round after it was written."""
        self.last_finished = self._last_started
        self._step, self._is_taken = None, False
        self._num_bytes = _size(self._summary)

    def begin_again(self) -> None:
        """Repeat the round that another coordinator has not ended. Raises: RunError if its line cannot be removed."""
        if _size(self._summary) > self._num_bytes:
            with disk_errors(self._summary):
                os.truncate(self._summary, self._num_bytes)
        self._pending.clear()
        if self._step is not None:
            self.start(self._step)

    @property
    def _num_due(self) -> int:
        return sum(len(prompts) for prompts in self._tasks.values())

    @property
    def _num_answered(self) -> int:
        return len(self._groups) + sum(self._num_failed.values())

    def _summarise(self, task: str, step: int) -> dict[str, object]:
        groups = sorted((g for g in self._groups if g.prompt.eval_set == task), key=lambda g: g.prompt.uid)
        path = self._directory / f"{task}-step-{step:06d}.jsonl"
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # half of a surrogate pair: escaped
            for group in groups:
                answers = zip(final_trajectories(group.trajectories), group.scores, strict=True)
                for sample, (last, score) in enumerate(answers):
                    line = {
                        "uid": group.prompt.uid,
                        **({"sample": sample} if self._plan.group_size > 1 else {}),
                        "prompt": group.prompt.text,
                        "gt_answer": shown_truth(group.prompt.ground_truth),
                        "response": last.text,
                        "finish_reason": last.finish_reason,
                        **score_fields(score),
                        **_environment_fields(group, sample),
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        versions = {version for group in groups for version in group.policy_versions.tolist()}
        return {
            "step": step,
            "task": task,
            "policy_versions": sorted(
                versions
            ),  # more than one if all producers that held the step's weights were lost
            **self._accuracy(self._tasks[task], groups),
            "num_invalid": sum(score.verdict == "invalid" for group in groups for score in group.scores),
            "num_failed": self._num_failed.get(task, 0),
            **self._by_task(self._tasks[task], groups),
        }

    def _accuracy(self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the accuracy over prompts, and over several samples avg@N and pass@k; `groups` are the answered."""
        num_samples, temperature = self._plan.group_size, self._plan.sampling.temperature
        num_correct = [sum(score.answer_correct for score in group.scores) for group in groups]
        figures = {"accuracy": sum(num_correct) / (len(prompts) * num_samples), "num_prompts": len(prompts)}
        if temperature > 0:
            figures |= {"num_samples": num_samples, "temperature": temperature}
        if num_samples > 1:
            figures |= sampled_accuracy([*num_correct, *[0] * (len(prompts) - len(groups))], num_samples)
        return figures | self._rewards(prompts, groups)

    def _rewards(self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return mean and maximum of the rewards of the answers with a verdict, and what an answer needs, if known."""
        scores = [score for group in groups for score in group.scores if score.verdict != "invalid"]
        rewards = np.array([score.reward for score in scores if math.isfinite(score.reward)], dtype=np.float64)
        figures: dict[str, Any] = {"reward_mean": None, "reward_max": None}
        if len(rewards):
            figures = {"reward_mean": float(rewards.mean()), "reward_max": float(rewards.max())}
        needed = {self._correct_from.get(prompt.task) for prompt in prompts}
        return figures | ({"correct_from": needed.pop()} if len(needed) == 1 and None not in needed else {})

    def _by_task(self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the accuracy of each task whose rows the evaluation set has, if there are several."""
        names = list(dict.fromkeys(prompt.task for prompt in prompts))
        if len(names) < 2:
            return {}
        of_task = {
            name: self._accuracy(
                [prompt for prompt in prompts if prompt.task == name],
                [group for group in groups if group.prompt.task == name],
            )
            for name in names
        }
        return {"by_task": of_task}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _environment_fields(group: RolloutGroup, sample: int) -> dict[str, Any]:
    """Return the whole conversation that an environment's answer ends, and what it noted about the episode."""
    if not group.records:
        return {}
    record = group.records[sample]
    return {**conversation_fields(record, -1), "environment": without_conversations(record)}
