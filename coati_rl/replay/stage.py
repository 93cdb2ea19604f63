"""Hold what the recomputation of one stage of a step has found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "differs", "not checked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStage:
    """Say whether a stage agrees with what the run has recorded; `text` has the figures, or why it is not checked."""

    name: str
    verdict: Verdict
    text: str

    @property
    def line(self) -> str:
        """Return the line that is printed."""
        return f"{self.name:<18} {self.verdict:<12} {self.text}"


def checked(name: str, problem: str | None, figures: str) -> ReplayStage:
    """Return a stage that was checked. `problem`: the first difference; None: there is none."""
    return ReplayStage(name=name, verdict="agrees" if problem is None else "differs", text=problem or figures)


def unchecked(name: str, reason: str) -> ReplayStage:
    """Return a stage that the files do not allow to check."""
    return ReplayStage(name=name, verdict="not checked", text=reason)


def first_difference(stages: Sequence[ReplayStage]) -> ReplayStage | None:
    """Return the first stage that differs; None if none does."""
    return next((stage for stage in stages if stage.verdict == "differs"), None)


def conclusion(stages: Sequence[ReplayStage]) -> str:
    """Return the last line that is printed."""
    first = first_difference(stages)
    if first is not None:
        return f"the first stage that differs: {first.name}: {first.text}"
    left_out = [stage.name for stage in stages if stage.verdict == "not checked"]
    if not left_out:
        return "every stage agrees"
    return f"every stage that can be checked agrees; not checked: {', '.join(left_out)}"
