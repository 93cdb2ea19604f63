"""The trainers' default process group: gloo on CPUs, NCCL on GPUs, reachable from where the run is and no further.

Rank 0 makes the meeting point and tells the others (through whatever started them); then all call `init_process_group`
with the same arguments but the rank. It replaces `colossalai.launch`, whose store listens on every interface and whose
collectives wait for half an hour.

On one machine the meeting point is a file, so that no other user of the machine can read or write the store: torch's
TCP store knows no password, and lists its keys to whoever connects. Nothing that comes over these groups is unpickled.
"""

import functools
import logging
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from coati_rl.errors import CollectiveError, ConfigError, EngineError, RunError
from coati_rl.types import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """Describe where the trainers find each other: the store is served at rank 0's port, or it is a file."""

    address: str  # rank 0's; the others' collectives listen towards it
    port: int = 0  # of the store; 0: it is a file
    file: Path | None = None


def private_meeting_point(address: str) -> MeetingPoint:
    """Make a store that is a file in a new directory of this user alone, for trainers on one machine."""
    return MeetingPoint(address=address, file=Path(tempfile.mkdtemp(prefix="coati-store-")) / "store")


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Listen on this address alone, for rank 0's store. Its port is `listener.getsockname()[1]`.

    Args:
        address: this machine's address as the other ranks reach it; 127.0.0.1 keeps the group on this machine.
        port: 0 lets the system choose a free one.
    Returns: the listening socket, to be handed to `init_process_group` in this process.
    Raises: ConfigError if the address is not this machine's or the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the trainers cannot meet at {address}:{port}: {error.strerror}; "
            "use --master_port 0 for a free port and an address of the machine that trainer 0 runs on"
        ) from error
    return listener


def interface_towards(address: str) -> str:
    """The name of the network interface from which this machine reaches an address, or that has it.

    Raises: EngineError if no route leads there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket only picks a route
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        raise EngineError(f"no way from here to the trainers' meeting point {address}: {error.strerror}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return name
    if ip_address(own).is_loopback:  # all of 127.0.0.0/8 is the loopback's, though one address is listed
        return "lo"
    raise EngineError(f"no network interface has the address {own}, from which {address} would be reached")


def init_process_group(
    *,
    rank: int,
    world_size: int,
    rendezvous: MeetingPoint,
    listener: socket.socket | None = None,
    timeout_s: float,
    seed: int,
    device: Device,
) -> torch.device:
    """Join the trainers' group and set this process up for training; blocks until all ranks are there.

    Args:
        rank: this trainer's, from 0.
        world_size: number of trainers.
        rendezvous: the same on all ranks.
        listener: rank 0's open listener if the meeting point has a port; the store takes it over.
        timeout_s: what joining, and each later collective, may take in seconds.
        seed: of Python's, NumPy's and torch's random numbers, the same on all ranks.
        device: what trainers compute on.
    Returns: the device to train on: this rank's GPU, or the CPU.
    Raises: EngineError if a rank does not arrive in time.
    """
    if (rank == 0 and rendezvous.file is None) != (listener is not None):
        raise ValueError("rank 0, and only rank 0, brings the listener of a meeting point with a port")
    timeout = timedelta(seconds=timeout_s)
    # gloo's pairs would resolve the host name and listen on whatever interface that is.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(rendezvous.address))
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())  # an actor that was given one GPU sees only that one
    try:
        store = _open_store(rendezvous, world_size, listener, timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        dist.barrier()
    except RuntimeError as error:
        where = rendezvous.file or f"{rendezvous.address}:{rendezvous.port}"
        raise EngineError(f"trainer {rank} of {world_size} could not join at {where}: {error}") from error
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    logger.debug("trainer %d of %d joined at %s", rank, world_size, rendezvous)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _open_store(
    rendezvous: MeetingPoint, world_size: int, listener: socket.socket | None, timeout: timedelta
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
    """Exchange one text of each rank of the default group; `dist.all_gather_object` would unpickle what arrives.

    Returns: by rank.
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
    """Around code that waits for other ranks: what torch raises when one is gone becomes a CollectiveError.

    What a device raises is this rank's own fault and passes through: no memory, a failed assertion of a kernel.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:  # gloo knows no narrower type
        if "CUDA error" in str(error):  # cuBLAS and cuDNN say so in a plain RuntimeError
            raise
        if not dist.is_initialized():  # one process on its own waits for nobody
            raise
        rank, world_size = dist.get_rank(), dist.get_world_size()
        raise CollectiveError(
            f"trainer {rank} of {world_size} could not {what}; most likely another trainer ended or hangs: {error}"
        ) from error


def agree(action: Callable[[], None] | None) -> None:
    """Do this rank's share of something, and learn whether the others could do theirs; collective.

    Args:
        action: None if there is nothing to do on this rank.
    Raises: RunError on every rank if one could not; the error itself where it happened.
    """
    reason = ""
    try:
        if action is not None:
            action()
    except RunError as error:
        reason = str(error)
        raise
    except BaseException as error:
        reason = repr(error)
        raise
    finally:
        # Without this word the others would wait in the next step for a rank that has given up.
        with collective("finish a checkpoint together"):
            reasons = all_gather_texts(reason)
    for rank, reason in enumerate(reasons):
        if reason:
            raise RunError(f"trainer {rank}: {reason}")


@contextmanager
def timeout_of_new_groups(timeout_s: float) -> Iterator[None]:
    """Give groups that someone else makes meanwhile our timeout: `dist.new_group` takes half an hour, not its parent's.

    It cannot be set afterwards: gloo's receives between two ranks keep to that which their group was made with.
    """
    new_group = dist.new_group
    dist.new_group = functools.partial(new_group, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.new_group = new_group


def destroy_process_group() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
