"""The backend of the trainer processes of these tests, and what its optimizer holds."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from consumer.colossal_backend import ColossalBackend
from consumer.torch_backend import BackendConfig
from tests.integration.consumer.conftest import MAX_GRAD_NORM, WEIGHT_DECAY
from tests.integration.consumer.trainer_server import TIMEOUT_S


def make_backend(model_dir: Path, *, timeout_s: float = TIMEOUT_S, **settings: object) -> ColossalBackend:
    """On the CPU, with the tests' clipping norm."""
    defaults = {"max_grad_norm": MAX_GRAD_NORM, "weight_decay": WEIGHT_DECAY}
    config = BackendConfig(model_dir=model_dir, **{**defaults, **settings})
    return ColossalBackend(config, device=torch.device("cpu"), timeout_s=timeout_s)


def whole_tensors(backend: ColossalBackend, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of this stage from what each rank's optimizer holds of them; collective over the stage."""
    parameters = backend.parameters
    return {name: parameters.full(name, parameters.shard_of_slices(name, slices[name])) for name in parameters.by_name}
