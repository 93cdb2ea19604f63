"""Hold what a server knows: sessions, models with their requests, and samplers; a change is a record of the journal.

`apply` is the one way of a change, when it happens and when the journal is read again after a kill: what a server
knows is a function of its records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coati_rl.tinker.journal import Record

CREATE, LOAD, LOSS, STEP, SAVE, PUBLISH = "create", "load", "forward_backward", "optim_step", "save", "publish"
REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Hold the answer of a future."""

    body: bytes
    is_proto: bool = False
    is_error: bool = False


@dataclass(kw_only=True, slots=True)
class Session:
    """Hold a client's session."""

    id: str
    owner: str
    metadata: Any = None
    display_name: str | None = None


@dataclass(kw_only=True, slots=True)
class Request:
    """Hold a request of a model: number `seq` of its own; 0 is its creation."""

    id: str  # of its future
    model: str
    seq: int
    op: str
    args: Mapping[str, Any]
    body: bytes = b""
    reply: Reply | None = None
    is_forgotten: bool = False  # its answer was retrieved some time ago; what is left holds its place in line

    @property
    def changes_model(self) -> bool:
        """Return True if the model's weights, gradient or optimizer differ after it."""
        return self.op in (CREATE, LOAD, LOSS, STEP) and not (self.op == LOSS and self.args.get("is_forward_only"))


@dataclass(kw_only=True, slots=True)
class Model:
    """Hold a model and its requests that are still needed."""

    id: str
    owner: str
    session: str
    base: str
    metadata: Any = None
    rank: int = 0
    flags: dict[str, bool] = field(default_factory=dict)
    saved_seq: int = -1  # of the last request that its automatic checkpoint has seen
    saved_in: str | None = None  # name of that checkpoint
    requests: dict[int, Request] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Sampler:
    """Hold a sampler: of a base model, of a directory's weights, or of the weights that a model published last."""

    id: str
    owner: str
    session: str
    base: str
    path: str | None = None  # tinker://..., as its client sees it
    directory: str | None = None  # below the root; None: the base model
    made_by: str = ""  # id of the request that made the checkpoint there, whose path another one may take
    clients: int = 0
    follows: str | None = None  # the model whose publishing moves it
    samples: dict[int, "Sample"] = field(default_factory=dict)

    @property
    def weights(self) -> str | None:
        """Return a name of its weights that no others ever have; None of the base model."""
        return f"{self.directory}@{self.made_by}" if self.made_by else self.directory


@dataclass(kw_only=True, slots=True)
class Sample:
    """Hold a sampling request; it is computed again after a kill, from the same seed."""

    id: str
    sampler: str
    seq: int
    args: Mapping[str, Any]
    reply: Reply | None = None


class State:
    """Fold records."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.futures: dict[str, tuple[str, Request | Sample]] = {}  # by id: owner, and what is asked

    def apply(self, record: Record) -> Record:
        """Change what is known. Returns: the record, for the journal."""
        fields = dict(record.fields)
        getattr(self, f"_{fields.pop('kind')}")(record.body, **fields)
        return record

    def records(self) -> Iterator[Record]:
        """Yield records that lead to what is known now."""
        for session in self.sessions.values():
            yield _record("session", session)
        for model in self.models.values():
            yield _record("model", model, without=("requests",))
            for request in model.requests.values():
                yield _record("request", request, without=("body", "reply"), body=request.body)
                if request.reply is not None:
                    yield reply_record(request, request.reply)
        for sampler in self.samplers.values():
            yield _record("sampler", sampler, without=("samples",))
            for sample in sampler.samples.values():
                yield _record("sample", sample, without=("reply",))

    def _session(self, _: bytes, **fields: Any) -> None:
        self.sessions[fields["id"]] = Session(**fields)

    def _end_session(self, _: bytes, *, id: str) -> None:
        self.sessions.pop(id, None)
        for model in [each for each in self.models.values() if each.session == id]:
            self._end_model(b"", id=model.id)
        for sampler in [each for each in self.samplers.values() if each.session == id]:
            for sample in sampler.samples.values():
                self.futures.pop(sample.id, None)
            del self.samplers[sampler.id]

    def _model(self, _: bytes, **fields: Any) -> None:
        self.models[fields["id"]] = Model(**fields)

    def _end_model(self, _: bytes, *, id: str) -> None:
        model = self.models.pop(id, None)
        for request in model.requests.values() if model is not None else ():
            self.futures.pop(request.id, None)

    def _request(self, body: bytes, **fields: Any) -> None:
        model = self.models.get(fields["model"])
        if model is not None:  # else it ended meanwhile
            request = Request(body=body, **fields)
            model.requests[request.seq] = request
            if not request.is_forgotten:
                self.futures[request.id] = model.owner, request

    def _reply(self, body: bytes, *, model: str, seq: int, is_proto: bool, is_error: bool, **effects: Any) -> None:
        found = self.models.get(model)
        if found is None or seq not in found.requests:
            return
        request = found.requests[seq]
        request.reply = Reply(body=body, is_proto=is_proto, is_error=is_error)
        if not request.changes_model:  # no restart computes it again
            request.body = b""
        for name, changed in effects.items():  # saved_seq, saved_in, rank, flags
            setattr(found, name, changed)
        if "saved_seq" in effects:
            for each in [each for each in found.requests.values() if each.seq <= found.saved_seq]:
                each.body = b""
                if each.is_forgotten:
                    del found.requests[each.seq]

    def _sampler(self, _: bytes, **fields: Any) -> None:
        before = self.samplers.get(fields["id"])
        self.samplers[fields["id"]] = Sampler(**fields, samples=before.samples if before is not None else {})

    def _sample(self, _: bytes, **fields: Any) -> None:
        sampler = self.samplers.get(fields["sampler"])
        if sampler is not None:
            sample = Sample(**fields)
            sampler.samples[sample.seq] = sample
            self.futures[sample.id] = sampler.owner, sample

    def may_forget(self, name: str) -> bool:
        """Return True of an answered future whose request no restart would compute again."""
        _, asked = self.futures.get(name, ("", None))
        if not isinstance(asked, Request) or asked.seq <= self.models[asked.model].saved_seq:
            return True
        return asked.reply is not None and not asked.changes_model

    def _forget(self, _: bytes, *, id: str) -> None:
        asked = self.futures.pop(id, ("", None))[1]
        if isinstance(asked, Sample):
            self.samplers[asked.sampler].samples.pop(asked.seq, None)
        elif isinstance(asked, Request) and asked.seq <= (model := self.models[asked.model]).saved_seq:
            model.requests.pop(asked.seq, None)
        elif isinstance(asked, Request):
            asked.is_forgotten, asked.reply = True, Reply(body=b"")


def reply_record(request: Request, reply: Reply, **effects: Any) -> Record:
    """Return the record of a request's answer; effects: fields of its model that change by it."""
    fields = {"kind": "reply", "model": request.model, "seq": request.seq, **effects}
    return Record(fields=fields | {"is_proto": reply.is_proto, "is_error": reply.is_error}, body=reply.body)


def _record(kind: str, holder: Any, *, without: tuple[str, ...] = (), body: bytes = b"") -> Record:
    fields = {name: getattr(holder, name) for name in holder.__dataclass_fields__ if name not in without}
    return Record(fields={"kind": kind, **fields}, body=body)
