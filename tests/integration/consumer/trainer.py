"""Build the backend of these tests' trainer processes, and read its optimizer's state."""

import gc
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coati_rl.config.optimizer import OptimizerConfig
from consumer.backend import Backend, make_backend
from tests.backends import backend_config
from tests.integration.consumer.conftest import MAX_GRAD_NORM, WEIGHT_DECAY
from tests.integration.consumer.trainer_server import TIMEOUT_S


def make_trainer(model_dir: Path, *, timeout_s: float = TIMEOUT_S, **settings: object) -> Backend:
    """On the CPU, with the tests' clipping norm.

    Those that the process had before are collected first: until then each group of theirs keeps three threads of gloo;
    a trainer of the gradient matrix came to 99 of them.
    """
    gc.collect()
    optimizer = OptimizerConfig(max_grad_norm=settings.pop("max_grad_norm", MAX_GRAD_NORM), weight_decay=WEIGHT_DECAY)
    config = backend_config(model_dir, **{"optimizer": optimizer, **settings})
    return make_backend(config, device=torch.device("cpu"), timeout_s=timeout_s)


def whole_tensors(backend: Backend, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of this stage from what each rank's optimizer holds of them; collective over the stage."""
    parameters = backend.policy.parameters
    return {name: parameters.full_state(name, slices[name]) for name in parameters.infos}
