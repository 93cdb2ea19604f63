"""Define what a job and the trainer that runs it know of each other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.observability.timeline import Timeline
from coati_rl.protocols import TrainBackend

if TYPE_CHECKING:
    from consumer.models.scalar_head import ScalarHead


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Name the models that a trainer holds besides the one that it trains."""

    reference_dir: Path | None = None  # None: no reference model
    teacher_dir: Path | None = None  # None: no teacher
    keeps_old_policy: bool = False
    scalar_head: "ScalarHead | None" = None  # of the trained model, in place of its LM head


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """Hold what a job's loop needs of its process."""

    rank: int
    namespace: str  # of the run's actors in Ray
    run_dir: Path
    checkpoint_dir: Path
    timeline: Timeline
    on_step: Callable[[], None]  # called after every optimizer step

    def loop_options(self, backend: TrainBackend) -> dict[str, Any]:
        """Return the arguments of `TrainLoop` that do not depend on the job."""
        return {
            "is_reporter": backend.layout.is_reporter,
            "checkpoint_dir": self.checkpoint_dir,
            "on_step": self.on_step,
            "timeline": self.timeline,
        }
