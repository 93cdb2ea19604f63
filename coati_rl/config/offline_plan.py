"""Derive the numbers of a job on a dataset that a person checks before starting it (--dry-run prints them)."""

from dataclasses import dataclass

from coati_rl.config.offline import OfflineConfig
from coati_rl.config.plan import TrainingPlan, plan_lines
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Hold the sizes of a file of rows."""

    num_rows: int  # that are trained on
    num_equal: int  # pairs left out, as both completions are the same
    num_left_out: int  # rows left out, of which nothing is left to train within --max-length
    num_cut: int  # rows that were cut to --max-length
    num_tokens: int  # of all samples
    num_loss_tokens: int
    num_undecided: int = 0  # rollouts left out, as their reward is undecided

    def line(self) -> str:
        """Describe the rows in a clause."""
        parts = [f"{self.num_rows}", f"{self.num_tokens} tokens, {self.num_loss_tokens} of them trained"]
        parts += [f"{self.num_cut} cut to --max-length"] if self.num_cut else []
        left_out = {
            "pairs left out, as chosen equals rejected": self.num_equal,
            "left out, as their reward is undecided": self.num_undecided,
            "left out, as nothing trained is within --max-length": self.num_left_out,
        }
        parts += [f"{count} {why}" for why, count in left_out.items() if count]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflinePlan(TrainingPlan):
    """Hold what is planned of a job on a dataset."""

    config: OfflineConfig
    rows: RowCounts | None  # None: not tokenised, as the model is not on this machine
    evaluation: dict[str, RowCounts]  # by the set's name
    num_rows_dropped: int  # at the end, which fill no step

    def lines(self) -> list[str]:
        dropped = f" ({self.num_rows_dropped} rows at the end fill no step)" if self.num_rows_dropped else ""
        numbers = {
            "objective": self.config.objective_text,
            "rows": "unknown" if self.rows is None else self.rows.line(),
            **{f"rows of {name}": rows.line() for name, rows in self.evaluation.items()},
            "rows per step": self.config.rows_per_step,
            "optimizer steps": f"{'unknown' if self.num_steps is None else self.num_steps}{dropped}",
        }
        return [*TrainingPlan.lines(self), *plan_lines(numbers)]


def make_offline_plan(
    config: OfflineConfig,
    *,
    device: Device,
    rows: RowCounts | None,
    evaluation: dict[str, RowCounts],
    memory: tuple[str, ...],
) -> OfflinePlan:
    """Derive the plan; `rows` are None if they are not tokenised."""
    steps, dropped = None, 0
    if rows is not None:
        steps, dropped = divmod(rows.num_rows * config.data.max_epochs, config.rows_per_step)
        if config.data.max_steps is not None and config.data.max_steps < steps:
            steps, dropped = config.data.max_steps, 0
    return OfflinePlan(
        config=config,
        device=device,
        num_steps=steps,
        memory=memory,
        rows=rows,
        evaluation=evaluation,
        num_rows_dropped=dropped,
    )
