"""Name the classes of a run's actors; this module does not import Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coati_rl.protocols import GroupScorer  # imports torch, and the command line imports this module


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorClasses:
    """Hold the classes of a run's actors."""

    coordinator: type  # takes the prepared job, the run's paths and the actor's context
    trainer: type
    producer: type | None = None  # None: the run has no producers
    reward_model: type | None = None  # needed where the config has reward models
    make_reward: "Callable[[], GroupScorer] | None" = None  # picklable; starts the reward workers of a producer
