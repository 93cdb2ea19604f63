"""Start a Ray cluster of several nodes on this machine: a raylet each, at loopback addresses of their own.

The nodes stand for machines that a command is meant for. They share processor, disk and network, so that what one
machine lacks is not seen; that actors are placed, meet and exchange weights across nodes is.
"""

import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from coati_rl.errors import RunError

_OBJECT_STORE_BYTES = 100 * 2**20  # the least that Ray takes is 75 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInNodes:
    """Hold what a driver needs to join the cluster."""

    address: str  # of --master_address
    environment: dict[str, str]


def start_nodes(number: int, *, cpus: int, directory: Path, timeout_s: float) -> StandInNodes:
    """Start the nodes; their processes are children that the caller's subreaper ends.

    Args:
        number: of nodes, at least 1.
        cpus: logical ones of each.
        directory: for Ray's sockets and logs, with a short path, and for the token.
        timeout_s: for each node to start, seconds.
    Raises: RunError if one does not start.
    """
    token = directory / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    port = _free_port()
    head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory / 'ray'}")
    for node in range(number):
        place = head if node == 0 else (f"--address=127.0.0.1:{port}",)
        flags = (f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE_BYTES}")
        _start([f"--node-ip-address=127.0.0.{node + 1}", *flags, *place], environment, timeout_s)
    return StandInNodes(address=f"127.0.0.1:{port}", environment=environment)


def _start(flags: list[str], environment: dict[str, str], timeout_s: float) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats", *flags]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"a stand-in node did not start: {error}") from error
    if done.returncode:
        raise RunError(f"a stand-in node did not start: {' '.join(done.stdout.split())[-500:]}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
