"""Broadcast over gloo: CPU tensors, TCP sockets.

Members exchange their addresses in a store of rank 0: a file private to this user where all are on one machine, since
torch's TCP store has no password and lists its keys to any client; else the TCP store.
"""

import atexit
import ctypes
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, FileStore, ProcessGroupGloo, Store, TCPStore, Work

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.peer_connection import listen_on

_STORE_TIMEOUT = timedelta(hours=1)  # never reached: `Deadline` ends the wait sooner
_GRACE_S = 1.0  # gloo's own time limit is later by this, so that the error is ours


class GlooCommunicator:
    """Implement `Communicator` on a bare ProcessGroupGloo."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        host: str,
        deadline: Deadline,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Block until all ranks are connected; `host` is rank 0's address, from which the interface is chosen.

        `at_end` is called when the group is closed, or could not be connected.
        """
        self._at_end = at_end
        gloo: Any = ProcessGroupGloo  # torch's type stubs lack _Options and broadcast
        options = gloo._Options()
        options._devices = [_device_towards(host)]
        options._timeout = timedelta(seconds=deadline.remaining_s() + _GRACE_S)
        options._threads = 1
        try:
            self._group: Any = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            at_end()
            raise TransferError(f"rank {rank} of {world_size}, connecting: {_reason(error)}") from error
        self._works: list[Work] = []  # that may still run

    def start(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> "GlooOperation":
        if self._group is None:
            raise TransferError(f"{what}: the group is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=deadline.remaining_s() + _GRACE_S)
        self._works = [work for work in self._works if not work.is_completed()]
        try:
            work: Work = self._group.broadcast([data], options)
        except RuntimeError as error:
            raise TransferError(f"{what}: {_reason(error)}") from error
        self._works.append(work)
        return GlooOperation(work)

    def close(self) -> None:
        self._at_end()
        group, works = self._group, [work for work in self._works if not work.is_completed()]
        self._group, self._works = None, []
        if group is not None and works:
            # The group's destructor waits for the operations, until gloo's own time limit: not here.
            _unfinished_groups.append((group, works))
        _unfinished_groups[:] = [
            pair for pair in _unfinished_groups if not all(work.is_completed() for work in pair[1])
        ]


class GlooOperation:
    """Implement `Operation`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, *, deadline: Deadline, what: str) -> None:
        work = self._work
        try:
            while not work.is_completed():
                deadline.check(what)
                # gloo's abort() does not unblock a waiting thread, nor does the death of a receiver in mid-transfer
                # wake the sender: so wait in slices, which release the GIL, and check the deadline in between.
                with suppress(RuntimeError):  # the slice is over, or the operation failed: the next lines find out
                    work.wait(timedelta(seconds=deadline.slice_s()))
            work.wait()
        except RuntimeError as error:
            if deadline.remaining_s() == 0.0:
                raise TransferTimeoutError(f"{what}: not done within {deadline.timeout_s:g} s") from error
            raise TransferError(f"{what}: {_reason(error)}") from error


_unfinished_groups: list[tuple[Any, list[Work]]] = []  # closed groups, until their last operation has ended


@atexit.register
def _leak_unfinished_groups() -> None:
    """Leak these groups at exit: destroying them would wait for their operations, or abort the process."""
    for reference in [part for group, works in _unfinished_groups for part in (group, *works)]:
        _leak(reference)


def _leak(reference: object) -> None:
    """Keep an object until the process ends, past the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))


def open_store(host: str) -> tuple[Store, int | str]:
    """Create the key-value store over which gloo exchanges addresses.

    Returns: the store, and its address for the others: a port, bound to `host` alone, or a file, which `close_store`
        removes.
    """
    if _is_loopback(host):
        path = Path(tempfile.mkdtemp(prefix="coati-store-")) / "store"
        return _file_store(path), str(path)
    with listen_on(host) as listener:
        port = int(listener.getsockname()[1])
        descriptor = listener.detach()  # the store closes it
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=descriptor
    ), port


def connect_store(host: str, address: int | str) -> Store:
    """Connect to the trainer's store; `address` is what `open_store` returned."""
    try:
        if isinstance(address, str):
            return _file_store(Path(address))
        return TCPStore(host, address, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    except RuntimeError as error:
        raise TransferError(f"cannot reach the trainer's store at {host}, {address}: {error}") from error


def close_store(address: int | str) -> None:
    """Remove the store's file, when no member connects any more."""
    if isinstance(address, str):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _file_store(path: Path) -> FileStore:
    """Open the store of this file; it is never destroyed.

    Its destructor finds that the file exists, then opens it, and waits for the whole time limit if another member has
    removed it in between (torch 2.13.0, FileStore.cpp: it retries while there is no such file). It holds no descriptor.
    """
    store = FileStore(str(path))
    store.set_timeout(_STORE_TIMEOUT)
    _leak(store)
    return store


def _reason(error: RuntimeError) -> str:
    """Return gloo's message without its source path and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". This is typically")[0]


def _device_towards(host: str) -> ProcessGroupGloo.Device:
    """Return the interface to listen on: the loopback for a local store, else the one that routes to `host`.

    GLOO_SOCKET_IFNAME overrides it; gloo's default would be the address that the machine's name resolves to.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    if _is_loopback(host):
        return ProcessGroupGloo.create_device(hostname=host)
    address = _resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket only picks a route
        probe.connect((address, 9))
        return ProcessGroupGloo.create_device(hostname=str(probe.getsockname()[0]))


def _is_loopback(host: str) -> bool:
    return ip_address(_resolve(host)).is_loopback


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
