"""Put a server of Tinker's API together: what it knows, its journal, and what computes; end sessions that are silent.

Consumes: calls of the routes. Waits for: requests. Is unblocked by: `close`.
"""

import asyncio
import contextlib
import fcntl
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Request

from coati_rl.errors import ConfigError
from coati_rl.tinker.api_error import ApiError, not_found
from coati_rl.tinker.bases import Base, Bases
from coati_rl.tinker.checkpoints import Checkpoints
from coati_rl.tinker.futures import Futures
from coati_rl.tinker.journal import Journal, Record, read_journal
from coati_rl.tinker.limits import Keys, Limits
from coati_rl.tinker.operations import Operations
from coati_rl.tinker.sampling import Sampling
from coati_rl.tinker.state import Model, Sampler, Session, State
from coati_rl.tinker.training import Training

logger = logging.getLogger(__name__)

_SWEEP_S = 5.0
_MIN_REWRITE_BYTES = 2**27  # of the journal, at which a smaller one may take its place


class Service:
    """Serve base models to the owners of keys; a directory holds all that lasts."""

    def __init__(self, bases: Mapping[str, Base], root: Path, *, keys: Keys, limits: Limits) -> None:
        """Read the journal. Raises: ConfigError if another server has the directory, RunError if it is unreadable."""
        self.root, self.keys, self.limits = root.absolute(), keys, limits
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--root {root}: another server uses it; end that one, or give another root") from None
        self.state = State()
        path = self.root / "journal"
        for record in read_journal(path):
            self.state.apply(record)
        self._drop_unserved(bases)
        self._journal = Journal(path)
        self.bases = Bases(bases, batch_tokens=limits.batch_tokens)
        self.checkpoints = Checkpoints(self.root / "checkpoints")
        self.futures = Futures(max_in_flight=limits.max_in_flight)
        operations = Operations(self.root, self.checkpoints, max_checkpoint_bytes=limits.max_checkpoint_bytes)
        parts = (self.state, self._journal, self.futures, self.bases, operations, limits)
        self.training = Training(*parts)
        self.sampling = Sampling(*parts, self.root)
        self.training.published = self.sampling.take_published
        self._delete_orphans(operations)
        self._beats: dict[str, float] = {}  # time of the last heartbeat, of a monotonic clock
        self._rewritten = 0  # bytes of the journal after it was written anew
        self._sweeper: asyncio.Task[None] | None = None

    def _drop_unserved(self, bases: Mapping[str, Base]) -> None:
        """Forget the sessions whose base models are not served any more."""
        parts: list[Model | Sampler] = [*self.state.models.values(), *self.state.samplers.values()]
        for session in {each.session for each in parts if each.base not in bases}:
            logger.warning("session %s is dropped: a base model of it is not served any more", session)
            self.state.apply(Record(fields={"kind": "end_session", "id": session}))

    def _delete_orphans(self, operations: Operations) -> None:
        """Delete the weights that no record names: of sessions that ended, or written just before a kill."""
        saved = {model.saved_in for model in self.state.models.values()}
        for path in (self.root / "models").iterdir():
            if path.name not in saved:
                operations.forget(path.name)
        served = {sampler.directory for sampler in self.state.samplers.values()}
        for path in (self.root / "samplers").iterdir():
            if f"samplers/{path.name}" not in served:
                operations.forget_sampler(f"samplers/{path.name}")

    async def start(self) -> None:
        """Restore what the journal had, and begin to look for silent sessions."""
        self._rewrite_journal()
        self._beats = dict.fromkeys(self.state.sessions, time.monotonic())
        self.sampling.restore()
        await self.training.restore()
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """End all; what is not answered is computed by the next server of this directory."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self.sampling.close()
        await self.bases.close()
        self._journal.close()
        self._lock.close()

    def owner_of(self, request: Request) -> str:
        """Return who a request's key belongs to. Raises: ApiError of status 401."""
        return self.keys.owner(request.headers.get("x-api-key", ""))

    async def add_session(self, owner: str, metadata: Any, display_name: str | None) -> Session:
        """Begin a session."""
        name = f"session-{uuid.uuid4().hex}"
        fields = {"id": name, "owner": owner, "metadata": metadata, "display_name": display_name}
        self._beats[name] = time.monotonic()
        await self._journal.append(self.state.apply(Record(fields={"kind": "session", **fields})))
        return self.state.sessions[name]

    def session(self, name: str, owner: str) -> Session:
        """Return an owner's session. Raises: ApiError of status 404."""
        session = self.state.sessions.get(name)
        if session is None or session.owner != owner:
            raise not_found("session", name)
        return session

    def beat(self, name: str, owner: str) -> None:
        """Take a heartbeat. Raises: ApiError of status 410, at which the client sends no more."""
        try:
            self.session(name, owner)
        except ApiError as error:
            raise ApiError(410, error.message) from None
        self._beats[name] = time.monotonic()

    def end_session(self, session: Session) -> None:
        """End a session: its models, samplers and futures; its checkpoints stay."""
        samplers = [each for each in self.state.samplers.values() if each.session == session.id]
        models = self.models_of(session)
        self._beats.pop(session.id, None)
        self._journal.append_soon(self.state.apply(Record(fields={"kind": "end_session", "id": session.id})))
        for sampler in samplers:
            self.sampling.end(sampler)
        for model in models:
            self.training.end(model)

    async def add_sampler(self, sampler: Sampler) -> None:
        """Add a sampler; returns when it is in the journal."""
        await self._journal.append(self.sampling.add(sampler))

    def models_of(self, session: Session) -> list[Model]:
        """Return a session's models."""
        return [each for each in self.state.models.values() if each.session == session.id]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.session_timeout_s))
            try:
                self.sweep()
            except Exception:
                logger.exception("looking for what is over failed; it is tried again")

    def sweep(self) -> None:
        """End silent sessions, fail blocked requests, forget retrieved answers, delete expired checkpoints."""
        now = time.monotonic()
        for name, beat in list(self._beats.items()):
            if now - beat > self.limits.session_timeout_s and name in self.state.sessions:
                logger.info("session %s is over: no heartbeat for %.0f s", name, now - beat)
                self.end_session(self.state.sessions[name])
        self.training.fail_blocked()
        for name in self.futures.retrieved_before(now - self.limits.keep_answers_s):
            if self.state.may_forget(name):
                self._journal.append_soon(self.state.apply(Record(fields={"kind": "forget", "id": name})))
                self.futures.discard(name)
        self.checkpoints.delete_expired()
        if self._journal.num_bytes > max(2 * self._rewritten, _MIN_REWRITE_BYTES):
            self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        self._journal.rewrite(self.state.records())
        self._rewritten = self._journal.num_bytes
