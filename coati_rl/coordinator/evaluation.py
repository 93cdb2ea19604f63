"""Hold evaluation rounds: prompts that go out with priority at one policy version, and what came back.

Writes <eval dir>/<task>-step-<N>.jsonl (one line a response) and adds a line per task to <eval dir>/summary.jsonl.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from coati_rl.data.episodes import final_trajectories
from coati_rl.disk import disk_errors
from coati_rl.observability.records import score_fields, shown_truth, step_of_record
from coati_rl.types import Prompt, RolloutGroup
from coati_rl.work import Wait


class EvaluationRounds:
    """Keep at most one round at a time; under the coordinator's lock, but for `write`."""

    def __init__(self, tasks: Mapping[str, Sequence[Prompt]], directory: Path) -> None:
        self._tasks = tasks
        self._directory = directory
        self._pending: deque[Prompt] = deque()
        self._groups: list[RolloutGroup] = []
        self._num_failed: dict[str, int] = {}
        self._step: int | None = None
        self._is_taken = False  # by the writer of its files
        self._last_started = self.last_finished = -1  # steps; -1: none

    @property
    def is_running(self) -> bool:
        """True from `start` until the last answer is in and written."""
        return self._step is not None

    @property
    def wait(self) -> Wait:
        """Return what a round that is running makes others wait for."""
        state = f"{self._num_answered} of {self._num_due} prompts are answered"
        state = "its files are being written" if self._is_taken else state
        return Wait(reason=f"waiting for the evaluation at step {self._step}: {state}")

    @property
    def has_pending(self) -> bool:
        """True while prompts of the round wait for a producer."""
        return bool(self._pending)

    def resume(self, step: int, last_finished: int) -> None:
        """The run goes on at `step`, and had its last complete round at `last_finished`, unless files tell of more.

        A round that was under way when the checkpoint was made may have been completed since.
        """
        path = self._directory / "summary.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        done = [number for line in lines if (number := step_of_record(line)) is not None and number <= step]
        self._last_started = self.last_finished = max([last_finished, *done])

    def is_due(self, step: int, interval: int | None, *, is_over: bool) -> bool:
        """True when steps have passed a multiple of `interval` since the last round, and at the end of the run.

        `interval`: None is never.
        """
        if interval is None or self.is_running or step <= self._last_started:
            return False
        return is_over or step // interval > self._last_started // interval

    def start(self, step: int) -> None:
        """Begin a round at the weights of an optimizer step."""
        self._step = self._last_started = step
        self._pending.extend(prompt for prompts in self._tasks.values() for prompt in prompts)
        self._groups, self._num_failed = [], {}

    def draw(self) -> Prompt | None:
        """The next prompt to be leased."""
        return self._pending.popleft() if self._pending else None

    def add(self, group: RolloutGroup) -> None:
        """A scored answer."""
        self._groups.append(group)

    def add_failure(self, prompt: Prompt) -> None:
        """An answer that will never come; it counts as not correct."""
        self._num_failed[prompt.task] = self._num_failed.get(prompt.task, 0) + 1

    def take_if_done(self) -> bool:
        """Return True once, when all answers are in: `write` and then `close` are due."""
        if self._step is None or self._is_taken or self._num_answered < self._num_due:
            return False
        self._is_taken = True
        return True

    def write(self) -> list[dict[str, object]]:
        """Write the files of a round that was taken, which nothing else touches then; needs no lock.

        Returns: one summary per task. Raises: RunError if the disk refuses.
        """
        step = self._step or 0
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            summaries = [self._summarise(task, step) for task in self._tasks]
            with (self._directory / "summary.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(summary) + "\n" for summary in summaries)
        return summaries

    def close(self) -> None:
        """End a round that is written."""
        self.last_finished = self._last_started
        self._step, self._is_taken = None, False

    @property
    def _num_due(self) -> int:
        return sum(len(prompts) for prompts in self._tasks.values())

    @property
    def _num_answered(self) -> int:
        return len(self._groups) + sum(self._num_failed.values())

    def _summarise(self, task: str, step: int) -> dict[str, object]:
        groups = sorted((g for g in self._groups if g.prompt.task == task), key=lambda g: g.prompt.uid)
        with (self._directory / f"{task}-step-{step:06d}.jsonl").open("w", encoding="utf-8") as file:
            for group in groups:
                for last, score in zip(final_trajectories(group.trajectories), group.scores, strict=True):
                    line = {
                        "uid": group.prompt.uid,
                        "prompt": group.prompt.text,
                        "gt_answer": shown_truth(group.prompt.ground_truth),
                        "response": last.text,
                        "finish_reason": last.finish_reason,
                        **score_fields(score),
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        correct = sum(group.scores[0].answer_correct for group in groups)
        num_prompts = len(self._tasks[task])
        versions = {version for group in groups for version in group.policy_versions.tolist()}
        return {
            "step": step,
            "task": task,
            "policy_versions": sorted(
                versions
            ),  # more than one if all producers that held the step's weights were lost
            "accuracy": correct / num_prompts,
            "num_prompts": num_prompts,
            "num_invalid": sum(group.scores[0].verdict == "invalid" for group in groups),
            "num_failed": self._num_failed.get(task, 0),
        }
