"""Keep the checkpoint with the best value of an evaluation's metric besides the newest ones (--keep-best).

    <checkpoints>/best       a link to its directory, step-<N>; `prune` does not delete what it names
                  best.json  step, metric, value

The values are those of the evaluations' summary.jsonl, and the candidates are the checkpoints that exist, so that a
resumed run, whose later evaluations and checkpoints were set aside, finds the best one of what is left.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.directory import BEST_LINK, checkpoints_in, step_of
from coati_rl.disk import disk_errors
from coati_rl.errors import RunError
from coati_rl.observability.records import evaluation_figures, step_of_record

BEST_FILE = "best.json"
_SMALLEST = ("loss", "perplexity", "kl")  # metrics whose best value is the smallest, by the ends of their names


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """Name the best checkpoint of a run; one process at a time calls `update`."""

    metric: str  # as of `evaluation_figures`: eval/SET/accuracy
    checkpoints: Path
    evaluation: Path  # directory of summary.jsonl

    def update(self) -> dict[str, Any] | None:
        """Name the best checkpoint anew, after an evaluation or a checkpoint is complete; the earliest of equal ones.

        Returns: its record, if it is another one than before. Raises: RunError if it cannot be written, or
            no evaluation has the metric.
        """
        values = self._values()
        candidates = [step for path in checkpoints_in(self.checkpoints) if (step := step_of(path)) in values]
        with disk_errors(self.checkpoints):
            before = self._named()
            if not candidates:
                self._remove()
                return None
            sign = -1 if self.metric.endswith(_SMALLEST) else 1
            step = max(candidates, key=lambda each: (sign * values[each], -each))
            record = {"step": step, "metric": self.metric, "value": values[step]}
            if record != before:
                self._write(record)
        return record if before is None or before.get("step") != step else None

    def _values(self) -> dict[int, float]:
        """Return the metric by step, where the weights of that step alone were evaluated."""
        path = self.evaluation / "summary.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        summaries = [json.loads(line) for line in lines if step_of_record(line) is not None]
        figures = [(each, evaluation_figures(each)) for each in summaries]
        of_set = [named for each, named in figures if self.metric.startswith(f"eval/{each['task']}/")]
        if of_set and not any(self.metric in named for named in of_set):
            raise RunError(
                f"--keep-best {self.metric}: is no metric of the evaluations; use one of {', '.join(of_set[0])}"
            )
        return {
            each["step"]: value
            for each, named in figures
            if (value := named.get(self.metric)) is not None
            and each.get("policy_versions", [each["step"]]) == [each["step"]]
        }

    def _named(self) -> dict[str, Any] | None:
        """Return the record of the checkpoint that is named, if its link is there."""
        try:
            record = json.loads((self.checkpoints / BEST_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return record if (self.checkpoints / BEST_LINK).exists() and isinstance(record, dict) else None

    def _write(self, record: dict[str, Any]) -> None:
        """Replace link and record, each at once."""
        partial = self.checkpoints / f".{BEST_LINK}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(f"step-{record['step']}")
        partial.replace(self.checkpoints / BEST_LINK)
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(self.checkpoints / BEST_FILE)

    def _remove(self) -> None:
        for name in (BEST_LINK, BEST_FILE):
            (self.checkpoints / name).unlink(missing_ok=True)


def best_checkpoint(metric: str | None, checkpoints: Path, evaluation: Path) -> BestCheckpoint | None:
    """Return what names the best checkpoint of a run that begins or goes on; None without --keep-best.

    The checkpoint that was named may have been set aside when the run was resumed, so one is named anew.
    """
    if metric is None:
        return None
    best = BestCheckpoint(metric=metric, checkpoints=checkpoints, evaluation=evaluation)
    best.update()
    return best
