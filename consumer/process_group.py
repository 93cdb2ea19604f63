"""The trainers' default process group: gloo on CPUs, NCCL on GPUs, reachable from where the run is and no further.

Rank 0 opens a listener and tells the others its port (through whatever started them); then all call
`init_process_group` with the same arguments but the rank. It replaces `colossalai.launch`, whose store listens on every
interface and whose collectives wait for half an hour.
"""

import functools
import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

import numpy as np
import psutil
import torch
import torch.distributed as dist

from coati_rl.errors import CollectiveError, ConfigError, EngineError

logger = logging.getLogger(__name__)


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
    *, rank: int, world_size: int, address: str, port: int, listener: socket.socket | None, timeout_s: float, seed: int
) -> torch.device:
    """Join the trainers' group and set this process up for training; blocks until all ranks are there.

    Args:
        rank: this trainer's, from 0.
        world_size: number of trainers.
        address: rank 0's, as given to its `open_listener`.
        port: the listener's port.
        listener: rank 0's open listener, which the store takes over; None on all other ranks.
        timeout_s: what joining, and each later collective, may take in seconds.
        seed: of Python's, NumPy's and torch's random numbers, the same on all ranks.
    Returns: the device to train on: this rank's GPU, or the CPU.
    Raises: EngineError if a rank does not arrive in time.
    """
    if (rank == 0) != (listener is not None):
        raise ValueError("rank 0, and only rank 0, brings the listener")
    timeout = timedelta(seconds=timeout_s)
    # gloo's pairs would resolve the host name and listen on whatever interface that is.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(address))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())  # an actor that was given one GPU sees only that one
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        dist.barrier()
    except RuntimeError as error:
        raise EngineError(f"trainer {rank} of {world_size} could not join at {address}:{port}: {error}") from error
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    logger.debug("trainer %d of %d joined at %s:%d", rank, world_size, address, port)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Around code that waits for other ranks: what torch raises when one is gone becomes a CollectiveError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo knows no narrower type
        rank, world_size = dist.get_rank(), dist.get_world_size()
        raise CollectiveError(
            f"trainer {rank} of {world_size} could not {what}; most likely another trainer ended or hangs: {error}"
        ) from error


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
