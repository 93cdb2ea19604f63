"""Define what a job and the trainer that runs it know of each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coati_rl.config.training import TrainingConfig
from coati_rl.observability.timeline import Timeline
from coati_rl.protocols import Role
from consumer.backend_config import BackendConfig, ModelSource

if TYPE_CHECKING:
    from consumer.backend import Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """Hold what a job's loop needs of its process."""

    rank: int
    namespace: str  # of the run's actors in Ray
    run_dir: Path
    checkpoint_dir: Path
    timeline: Timeline
    on_step: Callable[[], None]  # called after every optimizer step
    objective_state: Mapping[str, Any]  # of the checkpoint that the run goes on from; empty: none

    def loop_options(self, backend: "Backend") -> dict[str, Any]:
        """Return the arguments of `TrainLoop` that do not depend on the job."""
        return {
            "is_reporter": backend.layout.is_reporter,
            "checkpoint_dir": self.checkpoint_dir,
            "on_step": self.on_step,
            "timeline": self.timeline,
        }


def backend_config(config: TrainingConfig, models: Mapping[Role, ModelSource], *, dtype: str) -> BackendConfig:
    """Return what a trainer's backend is built from.

    Args:
        config: of the job.
        models: by role.
        dtype: "float32" or "bfloat16", of engine weights and of weight transfers.
    """
    parallel = config.parallel
    return BackendConfig(
        models=models,
        tokenizer_dir=Path(config.model.model),
        chat_template=config.data.chat_template,
        template_date=config.data.template_date,
        plugin=parallel.plugin,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        zero_stage=parallel.zero_stage,
        precision="bf16" if dtype == "bfloat16" else "fp32",
        wire_dtype=getattr(torch, dtype),
        gradient_checkpointing=parallel.gradient_checkpointing,
        compile_ops=parallel.compile_ops,
        keep_checkpoints=config.run.keep_checkpoints,
    )
