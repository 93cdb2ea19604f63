"""Say what a trainer's backend is built from: its models by role, its layout and its precision."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coati_rl.config.model import RouterReplay
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.trainers import PluginName
from coati_rl.protocols import Role

if TYPE_CHECKING:
    from consumer.adapters.adapters import AdapterSource
    from consumer.models.policy_model import Precision
    from consumer.models.scalar_head import ScalarHead


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Say where a model comes from, and whether it is trained."""

    directory: Path  # Hugging Face model, or a checkpoint of ours
    # Clipping, weight decay and Adam's numbers; its learning rate is given with each step. None: the model is frozen.
    optimizer: OptimizerConfig | None = None
    head: "ScalarHead | None" = None  # in place of the LM head
    is_saved: bool = False  # a frozen model that changes, and is in checkpoints like trained ones
    adapters: "AdapterSource | None" = None  # trained in place of the model's weights
    shares: Role | None = None  # a frozen model that is this one's base, with the adapters above or none


def trained(
    directory: Path,
    optimizer: OptimizerConfig | None = None,
    *,
    head: "ScalarHead | None" = None,
    adapters: "AdapterSource | None" = None,
) -> ModelSource:
    """Return the source of a trained model. `optimizer`: None for the defaults."""
    return ModelSource(directory=directory, optimizer=optimizer or OptimizerConfig(), head=head, adapters=adapters)


def frozen(directory: Path) -> ModelSource:
    """Return the source of a model that only scores."""
    return ModelSource(directory=directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Hold the settings that a training backend is built from."""

    models: Mapping[Role, ModelSource]  # by role; "policy" is trained
    tokenizer_dir: Path | None = None  # tokenizer to copy into checkpoints; None: the policy's
    chat_template: str | None = None  # written into checkpoints in place of the tokenizer's
    template_date: str | None = None  # that the run's chat templates write as today's; kept in checkpoints
    plugin: PluginName = "hybrid"
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    fsdp_size: int = 0  # FSDP2: data-parallel ranks that share a copy of the weights; 0: all
    ep_size: int = 1  # FSDP2: data-parallel ranks that share the experts of a layer out
    zero_stage: int = 0
    precision: "Precision" = "fp32"  # bf16 keeps float32 master weights
    wire_dtype: torch.dtype = torch.float32  # dtype of exported weights: the inference engines' dtype
    sends_adapters: bool = False  # alone, and not merged into the base, which the engines have
    gradient_checkpointing: bool = False
    offload_activations: bool = False  # what is checkpointed waits in host memory
    balancing_coeff: float | None = None  # of the loss that balances the policy's experts; None: not observed
    router_replay: RouterReplay = "none"  # of the routes that micro-batches have
    compile_ops: bool | None = None  # see `compiled_ops`; None: on a GPU
    keep_checkpoints: int | None = None  # None: all
    # Frozen roles, and "optimizer" of the trained ones, whose memory is given up while they are not used.
    offload: frozenset[str] = frozenset()
    offload_dir: Path = Path(tempfile.gettempdir())  # of a CPU's files without names
