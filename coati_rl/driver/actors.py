"""Declare what the supervisor knows of a run's actors: Ray's (`actor_group`), or processes here (`local_actors`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from coati_rl.processes.heartbeats import Heartbeats


class Member(Protocol):
    """An actor, and the call that lasts as long as its work: `start` while it loads, `run` afterwards."""

    @property
    def name(self) -> str:
        """Return its name, such as trainer-0."""

    @property
    def handle(self) -> Any:
        """Return what its heartbeat is asked by."""

    @property
    def is_joined(self) -> bool:
        """Return True for a producer of another machine that has joined over HTTPS."""

    def is_done(self) -> bool:
        """Return True if the call has ended, whatever ended it."""

    def result(self) -> Any:
        """Return what the call has returned. Raises: RunError if it has failed."""


class Actors(Protocol):
    """Hold the actors of a run; see `actor_group` (Ray's) and `local_actors` (processes of this machine)."""

    @property
    def coordinator(self) -> Any:
        """Return the run's coordinator."""

    @property
    def heartbeats(self) -> Heartbeats:
        """Return the heartbeats of all members."""

    @property
    def trainers(self) -> Mapping[int, Member]:
        """Return the trainers by rank."""

    @property
    def producers(self) -> Mapping[int, Member]:
        """Return the producers that work, by number."""

    @property
    def starting(self) -> Mapping[int, Member]:
        """Return the producers that load their engine, by number."""

    @property
    def reward_models(self) -> Sequence[Member]:
        """Return the copies of reward models."""

    @property
    def scorers(self) -> Sequence[Member]:
        """Return the copies of reference and teacher that have devices of their own."""

    def members(self) -> Sequence[Member]:
        """Return all actors but the coordinator."""

    def add_producer(self) -> int:
        """Start a producer under a new number, without waiting for it. Returns: the number."""

    def admit_producer(self, producer_id: int) -> None:
        """Start the work of a producer whose engine is loaded."""

    def add_producer_if_room(self) -> int | None:
        """Start a producer if a node has room for it. Returns: its number, None if none has."""

    def add_joining(self) -> None:
        """Give the producers that wait to join over HTTPS their numbers."""

    def drop_producer(self, producer_id: int, cause: str, *, leaves: bool = False) -> None:
        """End a producer, dead, hung or alive, and issue its prompts again; with `leaves` none is to replace it."""

    def dead_raylets(self) -> list[str]:
        """Return the addresses of nodes whose raylet is dead."""
