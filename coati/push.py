"""Send a trainer's weights to an engine, checked by digests and by log-probabilities."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from coati.engine import Engine
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor
from coati_rl.errors import RunError, TransferError
from coati_rl.model_files.identity import weights_identity
from coati_rl.transport.manifest import WeightManifest
from consumer.offload_client import OffloadClient


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Describe weights that engines serve now, or will when they wake."""

    # Optimizer steps taken; the next number of the engine, if it has had a larger one: of another trainer, or before
    # `trainer.load` went back.
    policy_version: int
    # Of the bytes, the same at all senders and receivers; empty: the engine is one of the trainer's own weights.
    digest: str
    identity: str  # of the weights: the digest, or that of base and adapters
    # Largest |engine - trainer|, nats, over a sample's tokens; None: no sample was trained yet, or the engine sleeps.
    gap: float | None
    seconds: float


class Pusher:
    """Push the weights of one trainer, and compare an engine's log-probabilities with the trainer's."""

    def __init__(self, trainer: OffloadClient, monitor: LogprobMismatchMonitor) -> None:
        """Take the client of the ranks, and what judges a difference."""
        self._trainer, self._monitor = trainer, monitor

    def push(
        self, engine: Engine, version: int, probe: Sequence[int], *, timeout_s: float, is_shared: bool = False
    ) -> Push:
        """Let an engine serve the weights; one that sleeps keeps them until `engine.wake()`, which returns a Push, too.

        Args:
            engine: to which they go.
            version: of the weights. An engine's never decreases: if it has had a larger one, they get the next number.
            probe: tokens that both sides score; empty: nothing is compared.
            timeout_s: of the transfer, and of the commit.
            is_shared: the engine reads the trainer's own weights.
        Raises: TransferError; RunError if bytes or log-probabilities differ.
        """
        self._trainer.need("weights")
        begin = time.perf_counter()
        if version < engine.policy_version and not is_shared:
            version = engine.policy_version + 1
        digest, identity = ("", "") if is_shared else self._send(engine, version, timeout_s)
        tokens = [*probe] or [0, 0]
        self._monitor.expect(version, *next(filter(None, self._trainer.each("probe", tokens))))
        seconds = time.perf_counter() - begin
        pushed = Push(policy_version=version, digest=digest, identity=identity, gap=None, seconds=seconds)
        finish = partial(self._finish, engine, pushed, tokens, timeout_s, is_compared=bool(probe))
        if not engine.is_asleep:
            return finish()
        engine.wake_by(finish)
        return pushed

    def _send(self, engine: Engine, version: int, timeout_s: float) -> tuple[str, str]:
        """Stage the weights beside those that the engine serves, and compare bytes. Returns: digest and identity."""
        each = self._trainer.each
        manifest, invitations, senders = next(filter(None, each("open", engine.number, engine.ranks, version)))
        staged = engine.begin_staging(manifest, invitations, timeout_s)
        try:
            sent = {digest for digest in each("send", manifest, senders, timeout_s) if digest}
        except TransferError:
            staged()  # raises why an engine has not received it, if that was the reason
            raise
        received = {digest for digests in staged() for digest in digests}
        if sent != received or len(sent) != 1:
            raise RunError(f"corrupt weight transfer: sent {sorted(sent)}, received {sorted(received)}")
        (digest,) = sent
        engine.policy_version = version
        return digest, weights_identity(WeightManifest.from_json(manifest).base, digest)

    def _finish(self, engine: Engine, push: Push, probe: Sequence[int], timeout_s: float, *, is_compared: bool) -> Push:
        """Let the engine serve what it has received, and compare log-probabilities."""
        begin, gaps = time.perf_counter(), list[float]()
        for served, logprobs in engine.commit(push.policy_version, probe, timeout_s):
            if {*served} != {push.identity}:
                raise RunError(f"the engine serves weights {sorted(served)}, the trainers have {push.identity}")
            gap = self._monitor.measure(push.policy_version, logprobs) if is_compared else None
            if gap is not None:
                gaps.append(gap.max)
                if problem := self._monitor.probe_problem(push.policy_version, logprobs, gap):
                    raise RunError(problem)
        return replace(push, gap=max(gaps, default=None), seconds=push.seconds + time.perf_counter() - begin)
