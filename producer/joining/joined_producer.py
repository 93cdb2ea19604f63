"""Do for a producer on another machine what `ProducerActor` does for one in Ray.

The run calls `run`, `stage_weights` and `commit_weights`; the producer's requests come in by `answer`. An update is
received here, as by any producer, and handed on while the run goes on. What does not answer for `lost_after_s` is lost.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch

from coati_rl.errors import CoordinatorReplacedError, EngineError, PeerLostError, TransferError
from coati_rl.protocols import ProducerCoordinator
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import CommitResult
from producer.engines.staging import StagingArea
from producer.joining.frames import Frame, describe_reply, read_commit, read_groups
from producer.joining.prompt_calls import PromptCalls
from producer.joining.weight_copy import WeightCopy

_LOOK_S = 0.5  # between looks whether it is lost
_STAGING_LOOK_S = 0.01
_LONGEST_POLL_S = 5.0  # of a request that waits for something to happen
_GRACE_S = 20.0  # for the result of a commit to arrive, past the commit's own deadline


class JoinedProducer:
    """Stand between the run and one producer; called by threads of both."""

    def __init__(self, *, lost_after_s: float, commits_in_flight: bool) -> None:
        """Begin with a producer whose engine is loaded, and that has no number yet."""
        self.number: int | None = None
        self.is_offered = False  # to the driver, for a number
        self._lost_after_s, self._commits_in_flight = lost_after_s, commits_in_flight
        self._changed = Condition()
        self._heard_at = time.monotonic()
        self._coordinator: ProducerCoordinator | None = None  # from its admission on
        self._prompt_calls = PromptCalls(wait_s=_LONGEST_POLL_S)
        self._outcome: bool | None = None  # whether it has left, when its work is over
        self._ended = ""  # why it is not of the run any more
        self._is_over = False  # the run
        self.was_told = False  # that it is over
        self._staging = StagingArea(device=torch.device("cpu"))
        self._staged: WeightCopy | None = None
        self._proved: WeightCopy | None = None  # what the producer has, and the digest that says so
        self._order: dict[str, Any] | None = None  # of a commit that is not done
        self._result: Frame | None = None
        self._calls: dict[str, Callable[[Frame], Frame]] = {
            "number": self._answer_number,
            "beat": lambda _: Frame(fields={}),
            "lease": self._answer_lease,
            "put": self._answer_put,
            "fail": self._answer_fail,
            "rejoin": self._answer_rejoin,
            "order": self._answer_order,
            "bucket": self._answer_bucket,
            "committed": self._answer_committed,
            "leave": lambda _: self._finish(has_left=True),
            "done": lambda _: self._finish(has_left=False),
        }

    # --- the run ---------------------------------------------------------------------------------------------------

    def start(self) -> float:
        """Return the time that the engine took to load: it was loaded before."""
        return 0.0

    def run(self, coordinator: ProducerCoordinator) -> bool:
        """Return when the producer's work is over: whether it has left. Raises: PeerLostError if it is lost."""
        with self._changed:
            self._coordinator = coordinator
            self._changed.notify_all()
            while self._outcome is None:
                self.check_heard()
                self._changed.wait(_LOOK_S)
            return self._outcome

    def stage_weights(self, manifest: str, rendezvous: str, timeout_s: float) -> tuple[str, ...]:
        """Receive an update here; the producer gets it with the commit."""
        self.check_heard()
        update = WeightManifest.from_json(manifest)
        self._staging.start(update, Rendezvous.from_json(rendezvous), timeout_s=timeout_s)
        while (staged := self._staging.poll()) is None:
            time.sleep(_STAGING_LOOK_S)
        copy = self._staged
        if copy is None or not copy.has_layout_of(update):
            copy = WeightCopy(update)
        copy.fill(update, staged.tensors)
        copy.prove(staged.digest)
        self._staged = copy
        return (staged.digest,)

    def commit_weights(self, policy_version: int, probe: Sequence[int], timeout_s: float) -> CommitResult:
        """Have the producer get what was staged, prove it by its digest, and serve it; then score the probe."""
        staged, deadline = self._staged, time.monotonic() + timeout_s + _GRACE_S
        if staged is None or staged.manifest.policy_version != policy_version:
            raise EngineError(f"version {policy_version} is not staged")
        order = {
            "manifest": staged.manifest.to_json(),
            "digest": staged.digest,
            "probe": [*probe],
            "in_flight": self._commits_in_flight,
            "timeout_s": timeout_s,
        }
        with self._changed:
            self._order, self._result = order, None
            self._changed.notify_all()
            while self._result is None:
                self.check_heard()  # what has left is let go by the driver, which says so
                if self._outcome is False or time.monotonic() > deadline:
                    why = "has ended" if self._outcome is False else f"has not committed within {timeout_s:g} s"
                    raise PeerLostError(f"it {why}")
                self._changed.wait(_LOOK_S)
            result, self._order = self._result, None
        if cause := result.fields.get("error"):
            raise EngineError(str(cause))
        self._proved, self._staged = staged, self._proved
        return read_commit(result)

    def end(self) -> None:
        """Have nothing more to do with it: its next request is refused."""
        with self._changed:
            self._ended = self._ended or "the run has let it go"
            self._staged = self._proved = None  # the run may last for long, and others join
            self._changed.notify_all()
        self._staging.close()

    def tell_over(self) -> bool:
        """Answer its next request with the word that the run is over. Returns: False if nobody is there to hear it."""
        is_there = self.is_there and self._outcome is None
        with self._changed:
            self._is_over, self._ended = True, self._ended or "the run is over"
            self._changed.notify_all()
        return is_there

    @property
    def is_there(self) -> bool:
        """Return True unless it has left, is lost or was let go."""
        return not self._ended and self._outcome is None and time.monotonic() - self._heard_at <= self._lost_after_s

    def check_heard(self) -> None:
        """Raise PeerLostError if there was no request for too long, or it was let go."""
        silent_s = time.monotonic() - self._heard_at
        if not self._ended and silent_s > self._lost_after_s:
            self._ended = f"no request for {silent_s:.0f} s"
        if self._ended:
            raise PeerLostError(self._ended)

    # --- the producer ----------------------------------------------------------------------------------------------

    def answer(self, call: str, frame: Frame) -> Frame:
        """Answer a request. Raises: PeerLostError if the producer is not of the run; KeyError for an unknown call."""
        if self._is_over:
            self.was_told = True
            return Frame(fields={"is_over": True})
        self.check_heard()  # what was silent for too long has lost its prompts: it may not go on
        self._heard_at = time.monotonic()
        return self._calls[call](frame)

    @contextmanager
    def _leasing(self, frame: Frame) -> Iterator[tuple[int, ProducerCoordinator]]:
        if self._coordinator is None or self.number is None:
            raise CoordinatorReplacedError("the producer is not admitted yet")
        with self._prompt_calls.call(int(frame.fields["rejoins"])):
            yield self.number, self._coordinator

    def _answer_number(self, _: Frame) -> Frame:
        with self._changed:
            self._changed.wait_for(lambda: self._coordinator is not None, _LONGEST_POLL_S)
            return Frame(fields={"number": None if self._coordinator is None else self.number})

    def _answer_lease(self, frame: Frame) -> Frame:
        with self._leasing(frame) as (number, coordinator):
            reply = coordinator.lease(
                number,
                max_prompts=int(frame.fields["max_prompts"]),
                timeout_s=min(float(frame.fields["timeout_s"]), _LONGEST_POLL_S),
                is_drained=bool(frame.fields["is_drained"]),
            )
            return Frame(fields=describe_reply(reply))

    def _answer_put(self, frame: Frame) -> Frame:
        with self._leasing(frame) as (number, coordinator):
            return Frame(fields={"accepted": coordinator.put(number, read_groups(frame, producer_id=number))})

    def _answer_fail(self, frame: Frame) -> Frame:
        with self._leasing(frame) as (number, coordinator):
            coordinator.fail(number, int(frame.fields["lease_id"]), str(frame.fields["cause"]))
            return Frame(fields={})

    def _answer_rejoin(self, frame: Frame) -> Frame:
        self._prompt_calls.begin_rejoin(int(frame.fields["rejoins"]))
        with self._leasing(frame) as (number, coordinator):
            return Frame(fields={"void": coordinator.rejoin(number, [int(each) for each in frame.fields["held"]])})

    def _answer_order(self, frame: Frame) -> Frame:
        """Wait for a commit that the producer has not answered."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._order is not None and self._result is None) or self._outcome is not None or self._ended,
                _LONGEST_POLL_S,
            )
            return Frame(fields={"order": self._order if self._result is None else None})

    def _answer_bucket(self, frame: Frame) -> Frame:
        staged, proved, base = self._staged, self._proved, frame.fields["base"]
        version = int(frame.fields["version"])
        if staged is None or self._order is None or staged.manifest.policy_version != version:
            raise TransferError(f"version {version} is not to be committed now")
        is_delta = proved is not None and proved.digest == base and proved.has_layout_of(staged.manifest)
        data = staged.encode(int(frame.fields["index"]), proved if is_delta else None)
        return Frame(fields={"is_delta": is_delta}, payload=data)

    def _answer_committed(self, frame: Frame) -> Frame:
        with self._changed:
            if self._order is not None and self._staged is not None and self._result is None:
                if frame.fields["digest"] != self._order["digest"] and not frame.fields.get("error"):
                    raise EngineError(f"it serves weights of digest {frame.fields['digest']}")
                self._result = frame
                self._changed.notify_all()
        return Frame(fields={})

    def _finish(self, *, has_left: bool) -> Frame:
        with self._changed:
            self._outcome = has_left
            self._changed.notify_all()
        return Frame(fields={})
