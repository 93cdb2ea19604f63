"""Name the classes of a run's actors, and how long they may take to start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coati_rl.processes.run_dir import RunPaths
    from coati_rl.processes.trainer_process import Spawned
    from coati_rl.protocols import GroupScorer  # imports torch, and the command line imports this module

START_TIMEOUT_S = 600.0  # for an actor to load its engine; a large checkpoint on a shared disk takes minutes


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
    scorer: type | None = None  # needed where reference and teacher have devices of their own
    join_server: type | None = None  # needed where producers may join over HTTPS
    make_reward: "Callable[[], GroupScorer] | None" = None  # picklable; starts the reward workers of a producer
