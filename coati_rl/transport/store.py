"""How the members of a group find each other: a key-value store in the trainer, and a meeting before the group is made.

In: the trainer's address. Out: a store on which all ranks are known to be present. The meeting exists because neither
gloo's nor NCCL's own set-up can say who is missing, and NCCL's has no deadline at all.
"""

import socket
from datetime import timedelta
from time import sleep

from torch._C._distributed_c10d import Store, TCPStore

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

STORE_TIMEOUT = timedelta(seconds=3600)  # ours are the deadlines that count; the store's own would double some of them


def open_store(host: str) -> tuple[TCPStore, int]:
    """Serve a store on this address alone, at a port that the system chooses. A bare TCPStore listens on every one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise TransferError(f"cannot listen on {host}: {error}") from error
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),  # the store owns it from here on
        )
    return store, port


def connect_store(host: str, port: int, *, deadline: Deadline) -> TCPStore:
    """Connect to the trainer's store; refused at once when the trainer is gone."""
    try:
        socket.create_connection((host, port), timeout=deadline.remaining_s()).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    except (OSError, RuntimeError) as error:
        raise TransferError(f"cannot reach the trainer's store at {host}:{port}: {error}") from error


def meet(store: Store, *, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait until every rank is here. Raises: TransferTimeoutError naming the missing ranks, TransferError."""
    keys = {other: f"present/{other}" for other in range(world_size)}
    missing = set(keys)
    pause_s = 0.0005
    try:
        store.set(keys[rank], "1")
        while True:
            missing = {other for other in missing if not store.check([keys[other]])}
            if not missing:
                return
            names = ", ".join(str(other) for other in sorted(missing))
            deadline.check(f"rank {rank} of {world_size}, joining: waiting for rank {names}")
            sleep(min(pause_s, deadline.slice_s()))
            pause_s = min(2 * pause_s, 0.01)
    except RuntimeError as error:  # torch's DistError
        raise TransferError(f"rank {rank} of {world_size}, joining: lost the trainer's store: {error}") from error
