"""Own one model of a trainer in its role: load it, train or freeze it, export it, save its part of a checkpoint.

A trainer has several: the policy, which trains; a reference and the policy before the update ("old"), which do not. How
a model is spread over ranks is its `ShardedModel`'s business; here tensors have Hugging Face names and are whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from coati_rl.protocols import Role
from consumer.checkpoint import CheckpointReader, CheckpointWriter
from consumer.models.policy_model import DTYPES, PolicyInput, Precision, load_policy
from consumer.optim.gradient_clipping import scale_and_clip, sum_of_squares
from consumer.optim.optimizer_state import pack_state, unpack_state
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.parameters import ParameterInfo, describe_parameters

Head = Literal["lm"]
_LOADERS = {"lm": load_policy}  # of a head: (directory, dtype=, gradient_checkpointing=) -> model


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Describe how a model is trained; a frozen one has none of this."""

    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool = False


class Model:
    """Own one model over all ranks; methods are collective unless noted."""

    def __init__(
        self,
        role: Role,
        directory: Path,
        parallelism: Parallelism,
        *,
        precision: Precision,
        training: Training | None = None,
        head: Head = "lm",
    ) -> None:
        """Load and shard it.

        Args:
            role: what it is to the trainer.
            directory: Hugging Face model, or a checkpoint of ours.
            parallelism: over which it is sharded.
            precision: bf16 keeps float32 masters of what trains.
            training: None: it is frozen, and has no optimizer.
            head: what is computed from the last hidden states.
        Raises: ConfigError if it cannot be read, or not be sharded so.
        """
        self.role = role
        self.head = head
        self._parallelism = parallelism
        self._training = training
        self._keeps_masters = precision == "bf16"
        is_recomputed = training is not None and training.gradient_checkpointing
        # Hugging Face's; after sharding this rank's part of it.
        self.module = _LOADERS[head](directory, dtype=DTYPES[precision], gradient_checkpointing=is_recomputed)
        self.infos = describe_parameters(self.module, parallelism.layout, parallelism.layers_per_stage(self.module))
        self._adamw: Any = None
        if training is None:
            self.module.requires_grad_(False)
        else:
            # The learning rate is set by every step.
            self._adamw = torch.optim.AdamW(
                self.module.parameters(), lr=0.0, weight_decay=training.weight_decay, fused=True
            )
        self._sharded = parallelism.shard(self.module, self.infos, self._adamw)
        self.parameters = self._sharded.parameters
        self.gradients: dict[str, Tensor] = {}  # summed over all ranks; from the last mini-batch of a step to the step

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """Log-probabilities without gradient, float32[R, M] each; none on ranks without the head."""
        with torch.no_grad():
            return self._sharded.score(inputs)

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """Add the gradient of the summed loss. Returns: the sums that the loss reports; none without the head."""
        return self._sharded.accumulate(inputs) if inputs else {}

    def reduce_gradients(self) -> None:
        """Make `gradients` of what was accumulated on all ranks."""
        self.gradients = self._sharded.reduce_gradients()

    def masters(self) -> dict[str, Tensor]:
        """Name to this rank's part of the float32 tensor that is stepped on; not collective."""
        return self._sharded.masters()

    def optimizer_step(self, *, loss_scale: float, learning_rate: float) -> float:
        """Scale the gradient, clip it, step, and forget it; with a scale of 0 only forget it.

        Returns: the scaled gradient's norm before clipping, the same on every rank.
        Raises: EngineError if the norm is not finite; no weight has changed then.
        """
        if self._training is None:
            raise ValueError(f"the {self.role} model is frozen")
        counted = [gradient for name, gradient in self.gradients.items() if self.parameters.counts_in_norm(name)]
        norm = scale_and_clip(
            list(self.gradients.values()),
            self._parallelism.sum_over_ranks(sum_of_squares(counted)),
            loss_scale=loss_scale,
            max_norm=self._training.max_grad_norm,
        )
        if loss_scale > 0:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._sharded.step(self.gradients)
        self.gradients = {}
        self._sharded.forget_gradients()
        return norm

    @torch.no_grad()
    def copy_from(self, other: "Model") -> None:
        """Take over the weights of a model of the same architecture; each rank its own part, without collectives."""
        theirs = other.parameters.local
        for name, weight in self.parameters.local.items():
            weight.copy_(theirs[name])

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights by name, full, in Hugging Face order; a tied LM head is left out.

        Collective over the ranks of the first copy; nothing on the others. A tensor that needs neither cast nor gather
        is the live weight itself: use it before the next step.
        """
        if self._parallelism.layout.is_first_copy:
            for info in self.own_infos():
                yield info.name, self.parameters.full_weight(info.name).to(dtype)

    def own_infos(self) -> list[ParameterInfo]:
        """The parameters that this rank's stage exports and saves."""
        stage = self._parallelism.layout.stage
        return [info for info in self.parameters.infos.values() if info.stage == stage]

    def write(self, writer: CheckpointWriter) -> None:
        """Write this stage's files; `writer` is of all the model's parameters."""
        layout = self._parallelism.layout
        parts = self._parts(writer) if layout.is_first_copy or layout.is_partitioned else iter(())
        try:
            for part in parts:
                if layout.is_stage_head:
                    writer.write(*part)
        finally:
            for _ in parts:  # the ranks that hold the other shards go on to the end too
                pass

    def restore(self, reader: CheckpointReader) -> None:
        """Take over the optimizer's state, saved in any layout. Raises: ConfigError if it is another model's."""

        def part(name: str, kind: str) -> Tensor | None:
            full = reader.get(kind, name)
            return full if full is None or full.dim() == 0 else self.parameters.state_part(name, full)

        unpack_state(self._adamw, self.masters(), part)

    def _parts(self, writer: CheckpointWriter) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
        """File by file of this stage: its number, full weights, full tensors of the optimizer; on the CPU.

        Tensors are put together one at a time, and only the head of the stage keeps them.
        """
        masters, own, parameters = self.masters(), {info.name for info in self.own_infos()}, self.parameters
        for number, names in enumerate(writer.files):
            if names[0] not in own:
                continue
            weights, state = dict[str, Tensor](), dict[str, Tensor]()
            for name in names:
                self._keep(weights, name, parameters.full_weight(name))
                packed = pack_state(self._adamw, masters[name], with_master=self._keeps_masters)
                for kind, part in packed.items():
                    full = part if kind == "step" else parameters.full_state(name, part)
                    self._keep(state, f"{kind}/{name}", full)
            yield number, weights, state

    def _keep(self, tensors: dict[str, Tensor], key: str, full: Tensor) -> None:
        if self._parallelism.layout.is_stage_head:
            tensors[key] = full.cpu()
