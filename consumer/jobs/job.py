"""Define what a job and the trainer that runs it know of each other."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coati_rl.config.held_models import offloaded
from coati_rl.config.kept_weights import DIRECTORY as KEPT_WEIGHTS
from coati_rl.config.kept_weights import KeptWeights
from coati_rl.config.training import TrainingConfig
from coati_rl.observability.timeline import Timeline
from coati_rl.protocols import Role
from consumer.backend_config import BackendConfig, ModelSource, frozen, trained
from consumer.gradient_record import GradientRecorder

if TYPE_CHECKING:
    from consumer.backend import Backend
    from consumer.models.scalar_head import ScalarHead


@dataclass(frozen=True, kw_only=True, slots=True)
class JobContext:
    """Hold what a job's loop needs of its process."""

    rank: int
    namespace: str  # of the run's actors in Ray
    run_dir: Path
    checkpoint_dir: Path
    timeline: Timeline
    on_step: Callable[[], None]  # called after every optimizer step
    objective_state: Mapping[str, Any]  # of the checkpoint that the run goes on from; empty: none

    def gradient_recorder(self, backend: "Backend", *, keep: int) -> GradientRecorder | None:
        """Return what records the gradients of the trained models; None if no step of them is kept."""
        is_writer = backend.layout.is_reporter
        return GradientRecorder(self.run_dir, backend.parallelism, is_writer=is_writer, keep=keep) if keep else None

    def loop_options(self, backend: "Backend", kept_weights: KeptWeights | None) -> dict[str, Any]:
        """Return the arguments of `TrainLoop` that do not depend on the job."""
        return {
            "kept_weights": kept_weights,
            "kept_weights_dir": self.run_dir / KEPT_WEIGHTS,
            "is_reporter": backend.layout.is_reporter,
            "checkpoint_dir": self.checkpoint_dir,
            "on_step": self.on_step,
            "timeline": self.timeline,
        }


def trained_model(
    config: TrainingConfig,
    base: Path,
    saved: Path | None,
    *,
    head: "ScalarHead | None" = None,
    start: Path | None = None,
) -> ModelSource:
    """Return the source of a model that a job trains.

    Args:
        config: of the job.
        base: the model at its start.
        saved: where a checkpoint has it; None: the job starts.
        head: in place of the LM head.
        start: adapters that the job starts with; None: new ones.
    """
    if not config.lora.is_on:
        return trained(saved or base, config.optimizer, head=head)
    from consumer.adapters.adapters import AdapterSource  # imports transformers

    adapters = AdapterSource(
        spec=config.lora.spec,
        base=str(base),
        seed=config.run.seed,
        directory=saved or start,
        has_four_bits=config.lora.load_in_4bit,
        takes_lm_head=head is None and config.lora.adapter is not None,
    )
    return trained(base, config.optimizer, head=head, adapters=adapters)


def policy_source(config: TrainingConfig, directory: Path, head: "ScalarHead | None" = None) -> ModelSource:
    """Return the source of the model that --model names. `directory`: its own, or a checkpoint's to go on from it."""
    base = Path(config.model.model)
    start = None if config.lora.adapter is None else Path(config.lora.adapter)
    return trained_model(config, base, None if directory == base else directory, head=head, start=start)


def start_model(config: TrainingConfig) -> ModelSource:
    """Return the source of the policy at its start, frozen; with adapters it shares the policy's base."""
    base = Path(config.model.model)
    if not config.lora.is_on:
        return frozen(base)
    start = policy_source(config, base).adapters if config.lora.adapter is not None else None
    return ModelSource(directory=base, shares="policy", adapters=start)


def backend_config(
    config: TrainingConfig, models: Mapping[Role, ModelSource], *, dtype: str, run_dir: Path | None = None
) -> BackendConfig:
    """Return what a trainer's backend is built from.

    Args:
        config: of the job.
        models: by role.
        dtype: "float32" or "bfloat16", of engine weights and of weight transfers.
        run_dir: where a CPU's files of --offload are; None: in the system's directory of temporary ones.
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
        cp_size=parallel.context_parallel_size,
        fsdp_size=parallel.fsdp_size,
        ep_size=parallel.expert_parallel_size,
        zero_stage=parallel.zero_stage,
        precision="bf16" if dtype == "bfloat16" else "fp32",
        wire_dtype=getattr(torch, dtype),
        sends_adapters=config.lora.sent_adapter is not None,
        gradient_checkpointing=parallel.recomputes_activations,
        offload_activations=parallel.offload_activations,
        balancing_coeff=config.setting("aux_loss_coeff", None),
        router_replay=config.router_replay,
        compile_ops=parallel.compile_ops,
        keep_checkpoints=config.run.keep_checkpoints,
        offload=offloaded(config),
        offload_dir=run_dir or Path(tempfile.gettempdir()),
    )
