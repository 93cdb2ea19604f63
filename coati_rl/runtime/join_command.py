"""Join the Ray cluster of a run with this machine, and leave it: `coati-rl join HOST:PORT`, `coati-rl leave`.

An address that begins with https:// is that of a run's --join-port: `coati.join` needs no cluster.

A run with --max-producers starts an engine on each node that has room. Before its node leaves, at SIGTERM (a
preemption notice) or Ctrl-C, each producer here gives its prompts back, and others sample them at once.
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError, RunError
from coati_rl.flag_numbers import integer_from, positive
from coati_rl.processes.exit_messages import no_temporary_directory

_GRACE_S = 20.0  # for producers to give their prompts back
_END_S = 15.0  # for Ray's processes of this node to end
_LOOK_S = 0.2


def join(arguments: Sequence[str]) -> int:
    """Join until a signal, then leave. Returns: 0 after a signal, 1 if the node ended by itself, 2 without TMPDIR."""
    if any(word.startswith(("https://", "http://")) for word in arguments):
        exit_code: int = import_module("coati.join").main(arguments)  # above this package in the order of imports
        return exit_code
    parser = argparse.ArgumentParser(prog="coati-rl join", description="Join the Ray cluster of a run.")
    parser.add_argument("address", help="of the cluster's head, HOST:PORT, or a run's --join-port, https://HOST:PORT")
    parser.add_argument("--num-cpus", type=integer_from(1), help="cores to offer; default: all")
    parser.add_argument("--num-gpus", type=integer_from(0), help="GPUs to offer; default: all")
    parser.add_argument("--node-ip-address", help="this machine's address; default: found by Ray")
    parser.add_argument("--grace-s", type=positive, default=_GRACE_S, help="for prompts to be given back, seconds")
    options = parser.parse_args(arguments)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # else Ray's client sends none
    try:
        with leaving() as is_leaving, joined_here(), _node(options) as node:
            while node.poll() is None and not is_leaving():
                time.sleep(_LOOK_S)
            if node.poll() is not None:
                raise RunError(
                    f"Ray's node here has ended with exit code {node.returncode}; is {options.address} alive?"
                )
            _say(f"{_give_back(options)} producers have given their prompts back; leaving {options.address}")
    except (RunError, ConfigError) as error:
        _say(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def leave(arguments: Sequence[str]) -> int:
    """Have every `coati-rl join` of this user on this machine leave. Returns: 1 if one does not end, 2 if none runs."""
    parser = argparse.ArgumentParser(prog="coati-rl leave", description="Leave the clusters that this machine joined.")
    parser.add_argument("--grace-s", type=positive, default=_GRACE_S, help="as of `coati-rl join`, seconds")
    options = parser.parse_args(arguments)
    try:
        notes = [note for note in _notes().iterdir() if _is_held(note)]
    except ConfigError as error:
        _say(str(error))
        return 2
    if not notes:
        _say("no `coati-rl join` of this user runs on this machine")
        return 2
    for note in notes:
        with suppress(ProcessLookupError):
            os.kill(int(note.name), signal.SIGTERM)
    deadline = time.monotonic() + options.grace_s + 2 * _END_S
    while (left := [note.name for note in notes if _is_held(note)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if left:
        _say(f"still there: process {', '.join(left)}")
    return 1 if left else 0


@contextmanager
def leaving(on_signal: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """Yield what tells whether a signal has come; `on_signal` is called when one does."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        on_signal()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RAY = Path(sys.executable).with_name("ray")
_WITH_PARENT = """
import os, signal, sys
from coati_rl.processes.ending import end_with_parent
end_with_parent(int(sys.argv[1]), signal.SIGTERM)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def _node(options: argparse.Namespace) -> Iterator["subprocess.Popen[bytes]"]:
    """Start Ray's node in the foreground of a session of its own, and end it."""
    flags = {
        "address": options.address,
        "num-cpus": options.num_cpus,
        "num-gpus": options.num_gpus,
        "node-ip-address": options.node_ip_address,
    }
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    command = [str(_RAY), "start", "--block", "--disable-usage-stats", *given]
    command = [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command]  # also if this process is killed
    node = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield node
    finally:
        node.terminate()  # it ends its processes
        with suppress(subprocess.TimeoutExpired):
            node.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)


def _give_back(options: argparse.Namespace) -> int:
    """Have the producers on this node give their prompts back and end. Returns: how many did, in time."""
    import ray

    from coati_rl.runtime.waits import ready

    try:
        ray.init(address=options.address, log_to_driver=False, configure_logging=False)
        here = options.node_ip_address or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        asked: list[Any] = []
        for each in named:
            if each["name"].startswith("producer-") and each["namespace"].startswith("coati-rl-"):
                actor: Any = ray.get_actor(each["name"], namespace=each["namespace"])
                asked.append(actor.leave.remote(here, options.grace_s))
        return sum(bool(_result(each)) for each in ready(asked, timeout_s=options.grace_s))
    except (ConnectionError, RuntimeError, ValueError) as error:
        _say(f"the producers here could not be asked: {' '.join(str(error).split())}")
        return 0
    finally:
        ray.shutdown()


def _result(reference: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reference, timeout=0)
    except RayError:  # it has ended meanwhile
        return None


@contextmanager
def joined_here() -> Iterator[None]:
    """Hold, in the block, the note by which `coati-rl leave` finds this process.

    It is locked by this process and no other, forked ones among them: what a killed one leaves is held by nobody,
    whichever process has its number then.
    """
    note = _notes() / str(os.getpid())
    with note.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def _is_held(note: Path) -> bool:
    """Return True if the process that wrote a note is alive."""
    try:
        with note.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which of them is the system's choice
        return True
    except FileNotFoundError:
        return False
    return False


def _notes() -> Path:
    """Return the private directory of this user's notes. Raises: ConfigError if it cannot be made, or is another's."""
    try:
        directory = Path(tempfile.gettempdir()) / f"coati-rl-join-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(no_temporary_directory(error)) from error
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(f"{directory}: belongs to another user; set TMPDIR to a directory of your own")
    return directory


def _say(text: str) -> None:
    sys.stderr.write(f"coati-rl: {text}\n")
