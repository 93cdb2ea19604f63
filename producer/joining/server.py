"""Serve producers of other machines over HTTPS: who they are, their prompts and groups, and the weights.

An actor on the driver's node; each producer that has joined is a `JoinedProducer`. A token is checked before a body is
read. Requests are POSTs, each answered at once or within five seconds; `frames` has the bodies.
"""

import asyncio
import hmac
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from coati_rl import __version__
from coati_rl.config import Config
from coati_rl.errors import CoatiError, ConfigError, CoordinatorReplacedError, PeerLostError
from coati_rl.model_files.identity import model_identity
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.http_bodies import read_body
from coati_rl.processes.http_server import listen
from coati_rl.processes.join_address import TOKEN_FILE, join_url
from producer.gateway.server import ServerThread
from producer.joining.frames import MAX_BODY_BYTES, PROTOCOL, Frame
from producer.joining.joined_producer import JoinedProducer

logger = logging.getLogger(__name__)

GONE, REPLACED, REFUSED = 410, 503, 409  # statuses: not of the run any more; say what you hold; no such producer here
_THREADS = 256  # requests at a time, most of which wait
_TOLD_LOOK_S = 0.05
_BODY_S = 120.0  # for a body to arrive


class _CallError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class JoinServer:
    """Hold the producers that have joined, by key and by number."""

    def __init__(self, config: Config, *, dtype: str, token: str) -> None:
        """Listen at --join-port. `dtype`: of engine weights and of weight transfers."""
        self._config, self._dtype, self._token = config, dtype, token
        self._lock, self._identity_lock = threading.Lock(), threading.Lock()
        self._by_key: dict[str, JoinedProducer] = {}
        self._by_number: dict[int, JoinedProducer] = {}
        self._identity = ""
        self._pool = ThreadPoolExecutor(_THREADS)
        parallel = config.parallel
        tls = {"ssl_certfile": parallel.join_cert, "ssl_keyfile": parallel.join_key} if parallel.join_cert else {}
        try:
            listener = listen(parallel.join_host, parallel.join_port or 0, is_shared=True)
        except OSError as error:  # in a cluster that runs nobody holds it
            port = f"--join-port {parallel.join_port}"
            raise ConfigError(f"{port}: cannot listen there: {error.strerror or error}; use another one") from error
        self._server = ServerThread(self._app(), listener, **tls)

    def url(self) -> str:
        """Return the address; answered when it listens."""
        return join_url(self._config.parallel)

    def waiting(self) -> list[str]:
        """Return the keys of producers that are to get a number, each once; those that have gone are forgotten."""
        with self._lock:
            found = {key: each for key, each in self._by_key.items() if not each.is_offered}
            for key, each in found.items():
                each.is_offered = True
                if not each.is_there:
                    del self._by_key[key]
            return [key for key in found if key in self._by_key]

    def admit(self, key: str, producer_id: int) -> None:
        """Give a producer its number."""
        producer = self._by_key[key]
        producer.number = producer_id
        self._by_number[producer_id] = producer
        logger.info("producer %d has joined", producer_id)

    def call(self, producer_id: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of a producer, by the run. Raises: PeerLostError if there is none."""
        producer = self._by_number.get(producer_id)
        if producer is None:
            raise PeerLostError(f"producer-{producer_id} has ended")
        result = getattr(producer, method)(*arguments)
        if method == "end":
            del self._by_number[producer_id]
        return result

    def tell_over(self, timeout_s: float) -> None:
        """Tell the producers that are there that the run is over, and wait until they have heard it."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            hearing = [each for each in self._by_key.values() if each.tell_over()]
        while not all(each.was_told for each in hearing) and time.monotonic() < deadline:
            time.sleep(_TOLD_LOOK_S)

    def close(self) -> None:
        """End it; requests are answered no more."""
        self._server.close()
        self._pool.shutdown(wait=False)

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

        @app.post("/v1/{call}")
        async def answer(call: str, request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                    raise _CallError(401, "the token is not that of the run")
                body = await read_body(request, max_bytes=MAX_BODY_BYTES, timeout_s=_BODY_S, problem=_CallError)
                frame = await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, call, body)
            except _CallError as error:
                return Response(str(error), status_code=error.status, media_type="text/plain")
            return Response(frame.to_bytes(), media_type="application/octet-stream")

        return app

    def _answer(self, call: str, body: bytes) -> Frame:
        try:
            frame = Frame.from_bytes(body)
            if call == "hello":
                return Frame(fields=self._hello())
            if call == "join":
                return Frame(fields={"key": self._join(frame)})
            producer = self._by_key.get(str(frame.fields["key"]))
            if producer is None:
                raise PeerLostError("the run does not know this producer")
            return producer.answer(call, frame)
        except PeerLostError as error:
            raise _CallError(GONE, str(error)) from error
        except CoordinatorReplacedError as error:
            raise _CallError(REPLACED, str(error)) from error
        except CoatiError as error:
            raise _CallError(REFUSED, str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _CallError(400, f"not a request of this protocol: {error!r}") from error

    def _hello(self) -> dict[str, Any]:
        """Say what the run is, so that a producer can tell before it loads anything whether it fits."""
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "identity": self._model_identity(),
            "config": self._config.flat("json"),
            "dtype": self._dtype,
        }

    def _join(self, frame: Frame) -> str:
        own = {"protocol": PROTOCOL, "version": __version__, "identity": self._model_identity()}
        for name, value in own.items():
            if (theirs := frame.fields[name]) != value:
                raise _CallError(REFUSED, f"its {name} is {theirs}, that of the run {value}")
        key, config = token_hex(16), self._config
        producer = JoinedProducer(
            lost_after_s=config.cluster.heartbeat_timeout_s, commits_in_flight=config.sync.commits_in_flight
        )
        with self._lock:
            self._by_key[key] = producer
        return key

    def _model_identity(self) -> str:
        with self._identity_lock:  # the first one reads the model
            self._identity = self._identity or model_identity(Path(self._config.model.model))
            return self._identity


class JoinServerActor(JoinServer):
    """Be a join server in a process of its own."""

    def __init__(self, config: Config, context: ActorContext) -> None:
        """Take the token from the run directory."""
        enter_actor(context)
        token = (context.log_dir.parent / TOKEN_FILE).read_text().strip()
        super().__init__(config, dtype=context.dtype, token=token)
