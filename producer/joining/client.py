"""Make the requests of a producer that has joined a run over HTTPS, and be its coordinator.

A request whose connection fails is made again until the run has been silent for `patience_s`. Where it may have had an
effect that is lost with the answer, prompts say, the rollout loop tells what it holds, as after a takeover.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.errors import ConfigError, CoordinatorReplacedError, EngineError, PeerLostError, RunOverError
from coati_rl.http_call import check_url
from coati_rl.text import shorten
from coati_rl.work import LeaseReply
from producer.joining.frames import MAX_BODY_BYTES, Frame, groups_frame, read_reply

_PAUSE_S = 0.5
_CONNECT_S = 10.0
_ANSWER_S = 60.0  # between two pieces of an answer
_STATUS_OK, _STATUS_GONE, _STATUS_REPLACED, _STATUS_REFUSED = 200, 410, 503, 409


class ConnectionLostError(PeerLostError):
    """Report that an answer did not arrive; the request may have had its effect."""


class JoinConnection:
    """Hold the connections to a run; used by several threads."""

    def __init__(self, url: str, token: str, *, ca_file: Path | None, patience_s: float) -> None:
        """Connect with the first request.

        Args:
            url: of the run's --join-port.
            token: of the run.
            ca_file: PEM file of the certificate that the run's is trusted by; None: this machine's.
            patience_s: for which requests that fail are made again.
        Raises: ConfigError.
        """
        self._url = check_url(url, flag="address").rstrip("/")
        self._patience_s = patience_s
        self._key: dict[str, str] = {}
        try:
            context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca {ca_file}: is no PEM file of certificates: {error}") from error
        self._client = httpx2.Client(
            verify=context,
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
        )

    def use_key(self, key: str) -> None:
        """Name the producer in all further requests."""
        self._key = {"key": key}

    def ask(self, call: str, frame: Frame | None = None, **fields: Any) -> Frame:
        """Make a request that may be made twice. Raises: as `repeat`."""
        return self.repeat(lambda: self.ask_once(call, frame, **fields))

    def repeat(self, ask_once: Callable[[], Frame]) -> Frame:
        """Make a request until it is answered. Raises: as `ask_once`; ConnectionLostError when patience is over."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return ask_once()
            except (ConnectionLostError, CoordinatorReplacedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def ask_once(self, call: str, frame: Frame | None = None, **fields: Any) -> Frame:
        """Make a request.

        Raises: RunOverError; ConfigError if the run refuses it; PeerLostError if this producer is not of it any more;
            ConnectionLostError; CoordinatorReplacedError.
        """
        given = frame or Frame(fields={})
        body = Frame(fields={**self._key, **given.fields, **fields}, payload=given.payload).to_bytes()
        try:
            reply = self._client.post(f"{self._url}/v1/{call}", content=body)
            content = reply.content
        except httpx2.TransportError as error:
            raise ConnectionLostError(f"{self._url}: {shorten(error, 200) or type(error).__name__}") from error
        if reply.status_code == _STATUS_OK and len(content) <= MAX_BODY_BYTES:
            answer = Frame.from_bytes(content)
            if answer.fields.get("is_over"):
                raise RunOverError(f"{self._url}: the run is over")
            return answer
        text = shorten(content.decode(errors="replace"), 300)
        if reply.status_code == _STATUS_GONE:
            raise PeerLostError(f"{self._url}: this producer is not of the run any more: {text}")
        if reply.status_code == _STATUS_REPLACED:
            raise CoordinatorReplacedError(text)
        if reply.status_code == _STATUS_REFUSED:
            raise EngineError(f"{self._url} refuses {call}: {text}")
        raise ConfigError(f"{self._url} answers {call} with status {reply.status_code}: {text}")

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class HttpCoordinator:
    """Implement `ProducerCoordinator` by requests; the numbers of producers are those of the run."""

    def __init__(self, connection: JoinConnection) -> None:
        """Use the connection of an admitted producer."""
        self._connection = connection
        self._num_rejoins = 0  # tries counted: none of them may come after a later one

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool) -> LeaseReply:
        fields = {"max_prompts": max_prompts, "timeout_s": timeout_s, "is_drained": is_drained}
        return read_reply(self._ask("lease", Frame(fields=fields)).fields)

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        return int(self._ask("put", groups_frame(groups)).fields["accepted"])

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        self._ask("fail", Frame(fields={"lease_id": lease_id, "cause": cause}))

    def rejoin(self, producer_id: int, held: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._connection.repeat(lambda: self._rejoin(held)).fields["void"])

    def _rejoin(self, held: Sequence[int]) -> Frame:
        self._num_rejoins += 1
        return self._connection.ask_once("rejoin", held=[*held], rejoins=self._num_rejoins)

    def _ask(self, call: str, frame: Frame) -> Frame:
        try:
            return self._connection.ask_once(call, frame, rejoins=self._num_rejoins)
        except ConnectionLostError as error:
            raise CoordinatorReplacedError(f"an answer to {call} is lost: {error}") from error
