"""The training engine without an engine: plain torch on one process. Tests and the Colossal backend build on it.

Consumes mini-batches; produces gradients, steps, log-probabilities, weights and checkpoints. A gradient is always the
plain sum over the global batch, accumulated until `optimizer_step` scales it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.protocols import LossFn
from consumer.checkpoint import load_optimizer_tensors, save_checkpoint
from consumer.gradient_clipping import GradientClipper
from consumer.optimizer_state import pack_state, unpack_state
from consumer.policy_model import (
    DTYPES,
    PolicyInput,
    Precision,
    blank_micro_batch,
    load_policy,
    make_input,
    policy_forward,
)
from consumer.reference import Reference
from consumer.weight_export import export_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """What a training engine is built from."""

    model_dir: Path  # Hugging Face model, or a checkpoint of ours
    reference_dir: Path | None = None  # model of the KL penalty; None: there is none
    precision: Precision = "fp32"  # bf16 keeps float32 master weights
    wire_dtype: torch.dtype = torch.float32  # of exported weights: the inference engines'
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


class TorchBackend:
    """One process, float32. A subclass may wrap model and optimizer, as long as `policy` stays the bare model."""

    dp_rank = 0
    dp_size = 1

    def __init__(self, config: BackendConfig, *, device: torch.device) -> None:
        self.config = config
        self.device = device
        dtype = DTYPES[config.precision]
        self.policy = load_policy(config.model_dir, dtype=dtype).to(device)
        # The learning rate is set by every step.
        self._adamw = torch.optim.AdamW(self.policy.parameters(), lr=0.0, weight_decay=config.weight_decay, fused=True)
        self._clipper = GradientClipper(max_norm=config.max_grad_norm)
        self._adamw.register_step_pre_hook(self._clipper)
        self._optimizer: Any = self._adamw
        self._reference = (
            None if config.reference_dir is None else Reference(config.reference_dir, dtype=dtype, device=device)
        )

    def score(self, micro_batch: MicroBatch, *, use_reference: bool) -> Tensor:
        """float32[R, L]: log-probabilities at the sampling temperature, 0 where the loss mask is False; no gradient."""
        inputs = make_input(micro_batch, device=self.device)
        if not use_reference:
            with torch.no_grad():
                return self._forward(inputs)[0]
        if self._reference is None:
            raise ValueError("this backend was built without a reference model")
        return self._reference.score(inputs)

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add the gradient of the summed loss; with the step's last mini-batch, sum it over ranks.

        The trainer's version of the weights is the number of steps taken, which is `mini_batch.step`.

        Returns: this rank's sums, float64[] each, as `loss_fn` reports them.
        """
        sums: dict[str, Tensor] = {}
        micro_batches = mini_batch.micro_batches
        if mini_batch.is_last and not micro_batches:
            micro_batches = (blank_micro_batch(),)
        for index, micro_batch in enumerate(micro_batches):
            inputs = make_input(micro_batch, device=self.device, trainer_version=mini_batch.step, loss_fn=loss_fn)
            is_last = mini_batch.is_last and index == len(micro_batches) - 1
            with nullcontext() if is_last else self._without_reduction():
                loss, terms = self._forward(inputs)
                self._backward(loss)
            sums = merge_sums(sums, terms)
        return sums

    def optimizer_step(self, *, loss_scale: float, learning_rate: float) -> float:
        """Scale the accumulated gradient, clip it, step, and forget it.

        Returns: the scaled gradient's norm before clipping, the same on every rank.
        Raises: EngineError if the norm is not finite; no weight has changed then.
        """
        self._clipper.loss_scale = loss_scale
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._clipper.norm

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, in Hugging Face order and wire dtype; a tied LM head is left out."""
        return export_weights(self.policy, dtype=self.config.wire_dtype)

    def save(self, directory: Path, *, state: dict[str, Any]) -> None:
        """Publish a checkpoint under this name. Raises: RunError if it cannot be written."""
        save_checkpoint(
            directory,
            model=self.policy,
            tokenizer_dir=self.config.model_dir,
            optimizer_tensors=pack_state(self._adamw, self._masters()),
            state=state,
        )

    def restore_optimizer(self, directory: Path) -> None:
        """Take over the optimizer of a checkpoint whose weights this backend was built from."""
        unpack_state(self._adamw, self._masters(), load_optimizer_tensors(directory))

    def close(self) -> None:
        """Nothing to release here."""

    def _forward(self, inputs: PolicyInput) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_forward(self.policy, inputs)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _without_reduction(self) -> AbstractContextManager[None]:
        """Around a forward and backward whose gradient stays on this rank for now."""
        return nullcontext()

    def _masters(self) -> dict[str, Tensor]:
        """Parameter name to the float32 tensor that the optimizer steps on."""
        return dict(self.policy.named_parameters())
