"""Score by a run's reference and teacher on a device of their own, as a Ray actor that trainers ask (--ref-devices).

`run` blocks in one of the actor's threads; requests wait in others and are computed one after the other.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coati_rl.config.held_models import remote_models
from coati_rl.config.training import TrainingConfig
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.heartbeats import Heartbeat
from coati_rl.types import Device
from consumer.environment import trainer_environment

if TYPE_CHECKING:
    from coati_rl.batch import MicroBatch
    from consumer.models.policy_model import Output
    from consumer.role_models import RoleModel

logger = logging.getLogger(__name__)


class ScorerActor:
    """Hold the reference and the teacher, whole, on one device."""

    @staticmethod
    def environment(config: TrainingConfig, device: Device) -> dict[str, str]:
        """Return the environment variables that must be set before the scorer's process starts."""
        return trainer_environment(config, device)

    def __init__(self, config: TrainingConfig, context: ActorContext) -> None:
        enter_actor(context)
        self._config, self._context = config, context
        self._models: dict[str, RoleModel] = {}
        self._lock = threading.Lock()  # of the models

    def start(self) -> float:
        """Load the models. Returns: the time it took, in seconds."""
        import torch

        from consumer.jobs.jobs import models_of
        from consumer.parallel.single_process import SingleProcess
        from consumer.role_models import RoleModel

        begin, config, context = time.perf_counter(), self._config, self._context
        self._device = torch.device(context.device)
        compile_ops = config.parallel.compile_ops
        for role, source in models_of(config, Path(config.model.model)).items():
            if role in remote_models(config):
                self._models[role] = RoleModel(
                    role,
                    source.directory,
                    SingleProcess(device=self._device),
                    precision="bf16" if context.dtype == "bfloat16" else "fp32",
                    compiles_ops=context.device == "cuda" if compile_ops is None else compile_ops,
                )
        logger.info("%s is ready: %s", context.name, ", ".join(self._models))
        return time.perf_counter() - begin

    def run(self) -> None:
        """Answer requests until the actor is killed."""
        threading.Event().wait()

    def score(self, role: str, micro_batches: "Sequence[MicroBatch]", output: "Output") -> list[np.ndarray]:
        """Return what `Backend.score` does, as arrays."""
        from consumer.models.policy_model import make_input

        with self._lock:
            inputs = [make_input(each, device=self._device, output=output) for each in micro_batches]
            return [score.cpu().numpy() for score in self._models[role].score(inputs)]

    def head_weights(self, role: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the LM head's weights, float32[V, H], and its bias, float32[V], of any model exactly."""
        with self._lock, self._models[role].head_weights() as head:
            if head is None:
                raise ValueError(f"the {role} model has no head")
            bias = None if head.bias is None else head.bias.detach().float().cpu().numpy()
            return head.weight.detach().float().cpu().numpy(), bias

    def beat(self) -> Heartbeat:
        """Return this process's heartbeat; answered while requests wait in all other threads."""
        from coati_rl.runtime.ray_heartbeats import actor_heartbeat  # imports Ray

        return actor_heartbeat()
