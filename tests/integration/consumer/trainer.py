"""What the trainer processes of these tests begin with: join the group that `conftest.launch` describes."""

import atexit
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from consumer.colossal_backend import ColossalBackend
from consumer.process_group import destroy_process_group, init_process_group
from consumer.torch_backend import BackendConfig
from tests.integration.consumer.conftest import MAX_GRAD_NORM, WEIGHT_DECAY

TIMEOUT_S = 60.0


def join() -> tuple[int, int, list[str]]:
    """Returns: rank, world size, and the arguments that are left."""
    torch.set_num_threads(1)
    rank, world_size, port, descriptor = map(int, sys.argv[1:5])
    init_process_group(
        rank=rank,
        world_size=world_size,
        address="127.0.0.1",
        port=port,
        listener=socket.socket(fileno=descriptor) if rank == 0 else None,
        timeout_s=TIMEOUT_S,
        seed=0,
    )
    atexit.register(destroy_process_group)  # gloo's threads do not survive the interpreter's end
    return rank, world_size, sys.argv[5:]


def make_backend(model_dir: Path, *, timeout_s: float = TIMEOUT_S, **settings: object) -> ColossalBackend:
    """On the CPU, with the tests' clipping norm."""
    config = BackendConfig(model_dir=model_dir, max_grad_norm=MAX_GRAD_NORM, weight_decay=WEIGHT_DECAY, **settings)
    return ColossalBackend(config, device=torch.device("cpu"), timeout_s=timeout_s)


def whole_tensors(backend: ColossalBackend, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of this stage from what each rank's optimizer holds of them; collective over the stage."""
    parameters = backend.parameters
    return {name: parameters.full(name, parameters.shard_of_slices(name, slices[name])) for name in parameters.by_name}
