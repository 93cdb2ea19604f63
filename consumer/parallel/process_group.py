"""Create the trainers' default process group: gloo on CPUs, NCCL on GPUs, not reachable from outside the run.

Rank 0 creates the store and returns its location, which the driver passes to the others; then all call
`init_process_group` with the same arguments but the rank. It replaces `colossalai.launch`, whose store listens on every
interface and whose collectives time out after half an hour.

On one machine the store is a file, so that no other user of the machine can read or write it: torch's TCP store has no
authentication, and lists its keys to every client. Nothing that is received over these groups is unpickled.
"""

import atexit
import functools
import json
import logging
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from coati_rl.errors import CollectiveError, ConfigError, EngineError, RunError
from coati_rl.types import Device
from consumer.parallel.store_location import StoreLocation

logger = logging.getLogger(__name__)

_GLOO = "third_party/gloo/gloo/transport/"  # in messages of lost connections and timeouts


def private_store_location(address: str) -> StoreLocation:
    """Return a store in a file, in a new directory that only this user can access, for trainers on one machine.

    The directory is removed when this process ends.
    """
    directory = Path(tempfile.mkdtemp(prefix="coati-store-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return StoreLocation(address=address, file=directory / "store")


def open_listener(address: str, port: int = 0, *, is_shared: bool = False) -> socket.socket:
    """Listen on this address only, for rank 0's store. Its port is `listener.getsockname()[1]`.

    Args:
        address: this machine's address as the other ranks reach it; 127.0.0.1 keeps the group on this machine.
        port: 0 lets the system choose a free one.
        is_shared: the run's driver holds the port, see `held_port`.
    Returns: the listening socket, an argument of `init_process_group` in this process.
    Raises: ConfigError if the address does not belong to this machine or the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"trainer 0 cannot listen at {address}:{port}: {error.strerror}; "
            "use --master_port 0 for a free port and an address of the machine that trainer 0 runs on"
        ) from error
    return listener


def interface_towards(address: str) -> str:
    """Return the name of the network interface that has an address or routes to it.

    Raises: EngineError if there is no route to the address.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket only selects a route
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        raise EngineError(
            f"the address of trainer 0, {address}, cannot be reached from this machine: {error.strerror}; "
            "check --master_address and the name resolution of this machine"
        ) from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return name
    if ip_address(own).is_loopback:  # all of 127.0.0.0/8 is loopback, though only one address is listed
        return "lo"
    raise EngineError(f"no network interface has the address {own}, from which {address} would be reached")


def init_process_group(
    *,
    rank: int,
    world_size: int,
    rendezvous: StoreLocation,
    listener: socket.socket | None = None,
    timeout_s: float,
    seed: int,
    device: Device,
) -> torch.device:
    """Join the trainers' process group and seed this process; blocks until all ranks have joined.

    Args:
        rank: of this trainer, from 0.
        world_size: number of trainers.
        rendezvous: location of the store, the same on all ranks.
        listener: rank 0's open listener if the store has a port; the store takes ownership of it.
        timeout_s: time limit of joining and of each later collective, in seconds.
        seed: of Python's, NumPy's and torch's random numbers, the same on all ranks.
        device: the kind of device that trainers compute on.
    Returns: the device to train on: this rank's GPU, or the CPU.
    Raises: EngineError if a rank does not arrive in time.
    """
    if (rank == 0 and rendezvous.file is None) != (listener is not None):
        raise ValueError("rank 0, and only rank 0, must pass the listener of a store with a port")
    timeout = timedelta(seconds=timeout_s)
    # By default gloo resolves the host name and listens on the interface of the result.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(rendezvous.address))
    on_gpu = device == "cuda"
    own = torch.device("cpu")
    if on_gpu:  # an actor with one GPU assigned sees only that one
        own = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
    try:
        store = _open_store(rendezvous, world_size, listener, timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # Else NCCL takes the GPU that is current at the first collective, and a barrier one by the rank's number.
            device_id=own if on_gpu else None,
        )
        dist.barrier()
    except RuntimeError as error:
        where = rendezvous.file or f"{rendezvous.address}:{rendezvous.port}"
        raise EngineError(
            f"trainer {rank} of {world_size} could not join the process group at {where}: {error}"
        ) from error
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    logger.debug("trainer %d of %d joined the process group at %s", rank, world_size, rendezvous)
    return own


def _open_store(
    rendezvous: StoreLocation, world_size: int, listener: socket.socket | None, timeout: timedelta
) -> dist.Store:
    if rendezvous.file is not None:
        store = dist.FileStore(str(rendezvous.file), world_size)
        store.set_timeout(timeout)
        return store
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        world_size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def all_gather_texts(text: str) -> list[str]:
    """Gather one text of each rank of the default group, without pickle, which `dist.all_gather_object` uses.

    Returns: the texts by rank.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(device)  # uint8[N]
    size = torch.tensor([len(text.encode())], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(1, *(int(other) for other in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [_decode(row, int(other)) for row, other in zip(gathered, sizes, strict=True)]


def _decode(row: torch.Tensor, size: int) -> str:
    return bytes(row[:size].tolist()).decode(errors="replace")


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Translate torch's errors of lost or silent ranks to CollectiveErrors; `what` completes "could not".

    All other errors are this rank's own, such as a wrong dtype or out of memory: they pass, with a note that says what
    was being done.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():  # a single process waits for no other
            raise
        who = f"trainer {dist.get_rank()} of {dist.get_world_size()}"
        if not _is_of_a_peer(error):
            error.add_note(f"{who} tried to {what}")
            raise
        raise CollectiveError(
            f"{who} could not {what}; another trainer has probably ended or hangs: {error}"
        ) from error


def _is_of_a_peer(error: RuntimeError) -> bool:
    """Return True for errors of a connection or a wait. gloo has no type of its own; it names its source file."""
    return isinstance(error, dist.DistError) or _GLOO in str(error)


def agree(action: Callable[[], str | None] | None, *, what: str = "finish a checkpoint together") -> list[str]:
    """Run this rank's action, and check that the other ranks' actions succeeded; collective.

    Args:
        action: None if this rank has nothing to do.
        what: for messages; completes "could not".
    Returns: the text that each rank's action returned, by rank; empty for none.
    Raises: RunError on every rank if one failed; the original error on the rank that failed.
    """
    reason = answer = ""
    try:
        if action is not None:
            answer = action() or ""
    except RunError as error:
        reason = str(error)
        raise
    except BaseException as error:
        reason = repr(error)
        raise
    finally:
        # Also after an error: the others would otherwise block in the next collective.
        with collective(what):
            heard = [json.loads(text) for text in all_gather_texts(json.dumps([reason, answer]))]
    for rank, (reason, _) in enumerate(heard):
        if reason:
            raise RunError(f"trainer {rank}: {reason}")
    return [answer for _, answer in heard]


@contextmanager
def timeout_of_new_groups(timeout_s: float) -> Iterator[None]:
    """Set the timeout of groups that are created in the body; `dist.new_group` defaults to half an hour.

    It cannot be set later: gloo's point-to-point receives use the timeout that the group was created with.
    """
    new_group = dist.new_group
    dist.new_group = functools.partial(new_group, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.new_group = new_group


def destroy_process_group() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
