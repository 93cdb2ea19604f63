"""Run `python -m rewards serve`: a reward service, until SIGINT or SIGTERM ends it.

Consumes: HTTP requests. Waits for: requests, the pool. Is unblocked by: a signal; requests in flight then get a few
seconds, and the scoring processes end with the pool. It uses plain HTTP: for other machines use a TLS proxy.
"""

import argparse
import asyncio
import os
import stat
import sys
from contextlib import closing
from pathlib import Path

from uvicorn.protocols.http.h11_impl import H11Protocol

from coati_rl.errors import ConfigError
from coati_rl.processes.http_server import ReadyServer, listen_as_told, server_config, url_of
from coati_rl.processes.interrupts import ended_by_signals
from coati_rl.reward_spec import public_reward_type
from rewards.commands.command_arguments import add_reward_arguments, reward_spec
from rewards.remote.service import RequestLimits, ScoringQueue, make_app
from rewards.remote.wire import MIN_TOKEN_LENGTH, TOKEN_VARIABLE, is_token
from rewards.scoring import open_scorer

_IDLE_S = 30.0  # close connections without requests; longer than clients reuse them, so that no request is lost
_GRACE_S = 5  # for requests in flight when the service ends
_MAX_CONNECTIONS = 512
_MAX_HEADER_BYTES = 64 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`."""
    limits = RequestLimits()
    add_reward_arguments(parser)
    parser.add_argument("--num-workers", type=int, default=_num_cores(), help="scoring processes (default: all cores)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, loopback)")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 picks a free one (default: %(default)d)")
    parser.add_argument("--token-file", type=Path, help=f"file with the token (default: the variable {TOKEN_VARIABLE})")
    parser.add_argument(
        "--max-body-mb",
        type=int,
        default=limits.max_body_bytes >> 20,
        help="largest request, MiB (default: %(default)d)",
    )
    parser.add_argument(
        "--max-responses", type=int, default=limits.max_responses, help="responses per request (default: %(default)d)"
    )
    parser.add_argument(
        "--max-queued",
        type=int,
        default=limits.max_queued,
        help="responses that may wait; beyond it clients are asked to retry later (default: %(default)d)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=float,
        default=limits.request_timeout_s,
        help="seconds that a request may wait for its scores (default: %(default)g)",
    )


def serve_command(options: argparse.Namespace) -> None:
    """Serve until a signal, which raises SystemExit(0) or KeyboardInterrupt.

    Raises: ConfigError for an invalid argument, before a port is opened; RunError if no scoring process starts.
    """
    token = _read_token(options.token_file)
    limits = _limits(options)
    spec = reward_spec(options)
    with (
        ended_by_signals(),
        listen_as_told(options.host, options.port, say=_say, what="token, prompts and responses") as listener,
        closing(open_scorer(spec, num_workers=options.num_workers)) as scorer,
    ):
        queue = ScoringQueue(scorer, spec.reward_type, options.num_workers, limits.max_queued)
        if (first := queue.probe()) is not None:
            first.result()  # bounded by the pool's time limit for starting a process
        config = server_config(
            make_app(queue, token, limits),
            http=_IdleTimeoutProtocol,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=int(_IDLE_S),
            timeout_graceful_shutdown=_GRACE_S + 2,
        )
        name = public_reward_type(spec.reward_type)
        ready = f"serving {name} on {url_of(listener)} (scoring processes: {options.num_workers})"

        def end() -> None:
            asyncio.get_running_loop().call_later(_GRACE_S, queue.abort_requests)

        ReadyServer(config, on_ready=lambda: _say(ready), on_end=end).run(sockets=[listener])


class _IdleTimeoutProtocol(H11Protocol):
    """Close a connection without requests after a timeout; uvicorn waits for a request's header without limit."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _read_token(path: Path | None) -> str:
    """Return the token of the file, otherwise of the environment.

    Raises: ConfigError without a token, or if it is too short or not allowed in an HTTP header.
    """
    # Removed from the environment, which scoring processes inherit: programs that they run must not get the token.
    from_environment = os.environ.pop(TOKEN_VARIABLE, "")
    source = f"--token-file {path}" if path is not None else TOKEN_VARIABLE
    try:
        token = (from_environment if path is None else path.read_text(encoding="ascii")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}; give a readable file with one line") from error
    if not is_token(token) or len(token) < MIN_TOKEN_LENGTH:
        problem = "holds no token" if not token else "holds a token with characters that HTTP headers do not allow"
        if is_token(token):
            problem = f"holds a token of {len(token)} characters, and at least {MIN_TOKEN_LENGTH} are needed"
        raise ConfigError(
            f"{source} {problem}; set a secret that the clients know, too: "
            f"export {TOKEN_VARIABLE}=\"$(python -c 'import secrets; print(secrets.token_hex(32))')\""
        )
    if path is not None and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _say(f"warning: {source} can be read by other users; run chmod 600 {path}")
    return token


def _limits(options: argparse.Namespace) -> RequestLimits:
    for flag in ("max_body_mb", "max_responses", "max_queued", "request_timeout_s"):
        if not getattr(options, flag) > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(options, flag)}: it must be positive")
    return RequestLimits(
        max_body_bytes=options.max_body_mb << 20,
        max_responses=options.max_responses,
        max_queued=options.max_queued,
        request_timeout_s=options.request_timeout_s,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _say(line: str) -> None:
    sys.stderr.write(f"rewards: {line}\n")
    sys.stderr.flush()
