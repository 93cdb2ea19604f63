"""Name the classes of a run's actors; this module does not import Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coati_rl.protocols import GroupScorer  # imports torch, and the command line imports this module
    from coati_rl.runtime.run_dir import RunPaths
    from coati_rl.runtime.trainer_process import Spawned


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorClasses:
    """Hold the classes of a run's actors."""

    coordinator: type  # takes the prepared job, the run's paths and the actor's context
    # Takes the prepared job and the run's paths; of jobs whose coordinator may be in the driver.
    make_coordinator: "Callable[[Any, RunPaths], Any] | None" = None
    trainer: type
    early_trainers: "Sequence[Spawned]" = ()  # processes for trainers of this machine that are started, by rank
    producer: type | None = None  # None: the run has no producers
    reward_model: type | None = None  # needed where the config has reward models
    make_reward: "Callable[[], GroupScorer] | None" = None  # picklable; starts the reward workers of a producer
