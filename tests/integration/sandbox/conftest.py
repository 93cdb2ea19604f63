"""Provide what attacks are after: places on this machine that hold a secret, or are open to whoever can reach them."""

import ctypes
import os
import platform
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from coati_rl.sandbox import Limits, Sandbox

PROJECT = Path(__file__).parents[3]
LIMITS = Limits(cpu_s=1)
SESSION_KEYRING = -3


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The machine as attacks find it."""

    secret: str
    places: dict[str, str]
    sleeper: "subprocess.Popen[bytes]"  # somebody's process, with the secret in its environment


def _say_to_all(server: socket.socket, secret: str) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        with connection:
            connection.sendall(secret.encode())


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    secret = f"coati-secret-{secrets.token_hex(16)}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="coati-secret-"))
        file, path = Path(folder) / "secret", f"{folder}/socket"
        file.write_text(secret, encoding="utf-8")
        abstract = f"coati-{secrets.token_hex(8)}"
        servers = [socket.create_server(("127.0.0.1", 0))]
        for address in (path, f"\0{abstract}"):
            servers.append(socket.socket(socket.AF_UNIX))
            servers[-1].bind(address)
            servers[-1].listen()
        for server in servers:
            stack.callback(server.close)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=_say_to_all, args=(server, secret), daemon=True).start()
        sleeper = subprocess.Popen(["sleep", "600"], env={**os.environ, "COATI_SECRET": secret})
        stack.callback(sleeper.wait)
        stack.callback(sleeper.kill)
        add_key = 217 if platform.machine() == "aarch64" else 248
        ctypes.CDLL(None).syscall(add_key, b"user", b"coati", secret.encode(), len(secret), SESSION_KEYRING)
        places = {
            "FILE": str(file),
            "SOCKET_FILE": path,
            "ABSTRACT": abstract,
            "PORT": str(servers[0].getsockname()[1]),
            "HOST_PID": str(os.getpid()),
            "SLEEPER_PID": str(sleeper.pid),
            "PROJECT": str(PROJECT),
        }
        yield Target(secret=secret, places=places, sleeper=sleeper)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        sandbox.run("", limits=LIMITS)
        yield sandbox
