"""Call actors with a deadline, and translate Ray's errors into those of `coati_rl.errors`.

The clients here have the interface of the local classes that they replace, so that loops do not depend on Ray.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.coordinator.run_status import RunStatus
from coati_rl.errors import CoatiError, CoordinatorReplacedError, PeerLostError, RunError
from coati_rl.runtime.joined_handle import producer_handle
from coati_rl.runtime.waits import result
from coati_rl.text import first_line
from coati_rl.types import CommitResult
from coati_rl.work import CommitReport, LeaseReply, ProbeReport, SyncReport, Wait, Work

if TYPE_CHECKING:
    from coati_rl.transport.manifest import WeightManifest
    from coati_rl.transport.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # for an actor to answer, on top of what the call itself may take
COORDINATOR = "coordinator"  # name of its actor
TAKEOVER_S = 60.0  # for another coordinator to take over from one that has ended
_LOOK_S = 0.25  # between looks for it
_FLUSH_GRACE_S = 5.0  # for the coordinator to answer, when the disk is slow or the run is ending
STAGING_GRACE_S = 10.0  # for a producer whose transfer has its own deadline; the other producers wait meanwhile


def wait_for(
    reference: "ray.ObjectRef[Any]", *, who: str, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
) -> Any:
    """Return the result of a remote call; `meanwhile` is called every two seconds until it is there.

    Raises: PeerLostError if the actor is dead or does not answer in time; the call's own CoatiError as it was raised;
        RunError for any other failure of the call.
    """
    try:
        return result(reference, timeout_s=timeout_s, meanwhile=meanwhile)
    except GetTimeoutError as error:
        raise PeerLostError(f"{who} did not answer within {timeout_s:g} s") from error
    except RayActorError as error:
        raise PeerLostError(f"{who} died: {_death_message(error)}") from error
    except RayTaskError as error:
        logger.info("%s failed: %s", who, error)  # with the remote traceback
        cause = error.cause
        if isinstance(cause, CoatiError):
            raise cause from error
        raise RunError(f"{who} failed: {type(cause).__name__}: {first_line(cause)}") from error
    except RayError as error:
        raise RunError(f"{who}: {first_line(error)}") from error


def _death_message(error: RayActorError) -> str:
    """Return the last line of Ray's message for an exception in the actor's __init__, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines and "creation task" in lines[0] else first_line(error)


def _await_another(lost: Any, error: PeerLostError) -> Any:
    """Return the coordinator that the driver has started in place of `lost`. Raises: `error` if it does not."""
    deadline = time.monotonic() + TAKEOVER_S
    while time.monotonic() < deadline:
        with suppress(ValueError):  # raised by Ray while there is no such actor
            another = ray.get_actor(COORDINATOR)
            if another._actor_id != lost._actor_id:
                return another
        time.sleep(_LOOK_S)
    raise error


class RemoteCoordinator:
    """Call `coati_rl.coordinator.coordinator.Coordinator` in another process. Picklable.

    A call whose coordinator dies is made again when another one has taken over: it may then be made twice.
    """

    def __init__(self, handle: Any, *, replace: Callable[[PeerLostError], Any] | None = None) -> None:
        """Take the actor; `replace` returns the one that takes over from it, else it is awaited under its name."""
        self._handle = handle
        self._replace = replace

    def _call(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        while True:
            handle = self._handle
            try:
                return self._ask(handle, method, *args, wait_s=wait_s, **kwargs)
            except PeerLostError as error:
                self._reconnect(handle, error)

    def _call_of_producer(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """Make a call of a producer. Raises: CoordinatorReplacedError."""
        handle = self._handle
        try:
            return self._ask(handle, method, *args, wait_s=wait_s, **kwargs)
        except PeerLostError as error:
            self._reconnect(handle, error)
            raise CoordinatorReplacedError(f"another coordinator has taken over: {error}") from error

    @staticmethod
    def _ask(handle: Any, method: str, *args: Any, wait_s: float, **kwargs: Any) -> Any:
        reference = getattr(handle, method).remote(*args, **kwargs)
        return wait_for(reference, who="the coordinator", timeout_s=wait_s + ANSWER_S)

    def _reconnect(self, lost: Any, error: PeerLostError) -> None:
        """Find the coordinator that takes over from `lost`; another thread may have found it. Raises: `error`."""
        if self._handle is lost:
            self._handle = _await_another(lost, error) if self._replace is None else self._replace(error)

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool) -> LeaseReply:
        options = {"max_prompts": max_prompts, "timeout_s": timeout_s, "is_drained": is_drained}
        reply: LeaseReply = self._call_of_producer("lease", producer_id, **options, wait_s=timeout_s)
        return reply

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        return int(self._call_of_producer("put", producer_id, groups))

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        self._call_of_producer("fail", producer_id, lease_id, cause)

    def rejoin(self, producer_id: int, held: Sequence[int]) -> tuple[int, ...]:
        """See ProducerCoordinator."""
        void: tuple[int, ...] = self._call("rejoin", producer_id, held)
        return void

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        work: Work | Wait = self._call("next_work", index, rank=rank, timeout_s=timeout_s, wait_s=timeout_s)
        return work

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        self._call("report_step", step, metrics)

    def report_evaluation(self, step: int, name: str, metrics: dict[str, Any]) -> None:
        """See `consumer.evaluation.DatasetReports`."""
        self._call("report_evaluation", step, name, metrics)

    def report_reference(self, part: int, logprobs: Sequence[np.ndarray], *, rank: int) -> None:
        """See `consumer.evaluation.DatasetReports`."""
        self._call("report_reference", part, logprobs, rank=rank)

    def report_sync(self, report: SyncReport) -> None:
        """See Coordinator."""
        self._call("report_sync", report)

    def report_probe(self, report: ProbeReport) -> None:
        """See Coordinator."""
        self._call("report_probe", report)

    def report_commit(self, report: CommitReport) -> None:
        """See Coordinator."""
        self._call("report_commit", report)

    def report_saved(self, step: int, path: str) -> None:
        self._call("report_saved", step, path)

    def add_producer(self, producer_id: int, *, is_extra: bool = False) -> None:
        self._call("add_producer", producer_id, is_extra=is_extra)

    def remove_producer(self, producer_id: int, cause: str, *, leaves: bool = False) -> None:
        self._call("remove_producer", producer_id, cause, leaves=leaves)

    def events(self, after: int, *, timeout_s: float) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._call("events", after, timeout_s=timeout_s, wait_s=timeout_s)
        return events

    def stop(self) -> None:
        self._call("stop")

    def flush(self, *, timeout_s: float) -> None:
        self._call("flush", timeout_s=timeout_s, wait_s=timeout_s + _FLUSH_GRACE_S - ANSWER_S)

    def status(self) -> RunStatus:
        status: RunStatus = self._call("status")
        return status


class RemoteScorers:
    """Implement `consumer.remote_model.Scorers` by calls to a run's scorers, found by their actors' names."""

    def __init__(self, count: int, *, timeout_s: float) -> None:
        """Take their number; `timeout_s` bounds the wait for an answer."""
        self.count, self._timeout_s = count, timeout_s

    def score(self, requests: Sequence[tuple[int, Any]], role: str, output: str) -> list[list[np.ndarray]]:
        asked = [
            (self._name(number), self._handle(number).score.remote(role, part, output)) for number, part in requests
        ]
        return [wait_for(reference, who=name, timeout_s=self._timeout_s) for name, reference in asked]

    def head_weights(self, role: str) -> tuple[np.ndarray, np.ndarray | None]:
        head: tuple[np.ndarray, np.ndarray | None] = wait_for(
            self._handle(0).head_weights.remote(role), who=self._name(0), timeout_s=self._timeout_s
        )
        return head

    def _name(self, number: int) -> str:
        return f"scorer-{number}"

    def _handle(self, number: int) -> Any:
        try:
            return ray.get_actor(self._name(number))
        except ValueError as error:  # raised by Ray if there is no such actor
            raise PeerLostError(f"{self._name(number)} has ended") from error


class RemoteProducer:
    """Implement `coati_rl.protocols.WeightReceiver` by calls to a producer, found by its actor name."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._handle = producer_handle(name, namespace)

    def stage_weights(
        self, manifest: "WeightManifest", rendezvous: "Rendezvous", *, timeout_s: float
    ) -> tuple[str, ...]:
        reference: Any = self._handle.stage_weights.remote(manifest.to_json(), rendezvous.to_json(), timeout_s)
        digests: tuple[str, ...] = wait_for(reference, who=self._name, timeout_s=timeout_s + STAGING_GRACE_S)
        return digests

    def sleep(self, *, timeout_s: float) -> None:
        reference: Any = self._handle.sleep.remote(timeout_s)
        wait_for(reference, who=self._name, timeout_s=timeout_s + ANSWER_S)

    def commit_weights(self, policy_version: int, probe: Sequence[int], *, timeout_s: float) -> CommitResult:
        reference: Any = self._handle.commit_weights.remote(policy_version, tuple(probe), timeout_s)
        # Includes time for the probe, which follows the commit.
        committed: CommitResult = wait_for(reference, who=self._name, timeout_s=timeout_s + 2 * ANSWER_S)
        return committed
