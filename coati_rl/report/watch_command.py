"""Serve the page of a run while it goes on, and after its end: `coati-rl watch RUN`.

Consumes: requests of browsers on this machine. Waits for: requests. Is unblocked by: SIGINT or SIGTERM. It reads the
run's files and keeps nothing; the run does not know of it.
"""

import argparse
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.processes.http_server import listen, server_config, url_of
from coati_rl.report.watch_app import make_app
from coati_rl.run_reader.run_directory import RunDirectory

_PROG = "coati-rl watch"
_TOKEN_BYTES = 24


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal. Returns: the exit code; 2 for invalid arguments, as for a directory that is no run's."""
    parser = argparse.ArgumentParser(prog=_PROG, description="Serve the page of a run on this machine, until Ctrl-C.")
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run that goes on, or has ended")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; default: a free one")
    given = parser.parse_args(arguments)
    try:
        run = RunDirectory(given.run)
        if not 0 <= given.port <= 65535:
            raise ConfigError(f"--port {given.port}: give 1 to 65535, or 0 for a free one")
        try:
            listener = listen(port=given.port)
        except OSError as error:
            raise ConfigError(f"--port {given.port}: cannot listen: {error.strerror}; 0 takes a free one") from error
    except CoatiError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    sys.stdout.write(f"{url_of(listener)}/{token}/ shows {given.run} to this machine alone, until Ctrl-C\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn ends its replies, and raises the signal again
    try:
        uvicorn.Server(server_config(make_app(run, token))).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0
