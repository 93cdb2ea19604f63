"""Take optimizer steps with the trainers' backend, and the same in plain torch and transformers.

Both consume packed micro-batches, of one row each, and produce the mean loss and the gradient's norm before clipping.
The plain loop is the fastest that we know how to write: logits of the loss's tokens alone, no entropy, no metrics,
fused AdamW; it cannot share prefixes. In bfloat16 its gradients accumulate in bfloat16, as `backward` leaves them, and
AdamW updates float32 masters.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch, MiniBatch
from consumer.backend import Backend
from consumer.models import packed_attention
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.train_step import TrainStep

RATE, WEIGHT_DECAY, MAX_NORM = 1e-7, 0.01, 1.0
PICKED = ("token_ids", "rollout_logprobs", "advantages", "loss_weights", "temperature")
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.28)
# Log ratios of sampled tokens, far enough from the clip bounds that rounding errors do not change which are clipped.
LOG_RATIOS = (-0.6, -0.1, -0.03, 0.03, 0.1, 0.6)
TOLERANCES = {"fp32": 1e-4, "bf16": 0.05}  # relative, of losses and norms


def load(directory: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model with this attention function."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)


class BackendLoop:
    """Take optimizer steps with the trainers' backend."""

    def __init__(self, backend: Backend, micro_batches: tuple[MicroBatch, ...], loss_scale: float) -> None:
        self._train_step = TrainStep(backend, PolicyGradient(loss=LOSS), learning_rate=LearningRate(peak=RATE))
        self._batch = MiniBatch(
            step=0, micro_batches=micro_batches, is_last=True, loss_scale=loss_scale, learning_rate_progress=0.0
        )

    def step(self) -> tuple[float, float]:
        """Take one optimizer step. Returns: the mean loss, NaN without the LM head; the norm before clipping."""
        metrics = self._train_step.run(self._batch) or {}
        return metrics.get("loss", float("nan")), metrics["grad_norm"]


class PlainLoop:
    """Hold the model and its optimizer."""

    def __init__(self, model: PreTrainedModel, micro_batches: tuple[MicroBatch, ...], loss_scale: float) -> None:
        self.model, self.parameters = model, list(model.parameters())
        # Of a float32 model the parameters themselves.
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self.micro_batches, self.loss_scale = micro_batches, loss_scale

    def step(self) -> tuple[float, float]:
        """Take one optimizer step over all micro-batches. Returns: the mean loss, the norm before clipping."""
        loss_sum = torch.zeros(())
        for micro_batch in self.micro_batches:
            loss = self._loss(micro_batch) * self.loss_scale
            loss.backward()
            loss_sum += loss.detach()
        pairs = [pair for pair in zip(self.parameters, self.masters, strict=True) if pair[0] is not pair[1]]
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        # In pieces: torch's norm of a large float32 tensor on a CPU has an error of 7e-4 at 16 million elements.
        pieces = [piece for m in self.masters if m.grad is not None for piece in m.grad.view(-1).split(2**16)]
        norm = torch.nn.utils.get_total_norm(pieces)
        torch.nn.utils.clip_grads_with_norm_(self.masters, MAX_NORM, norm)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return loss_sum.item(), norm.item()

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        arrays, arguments = micro_batch.loss_arrays, dict[str, Any]()
        if self.model.config._attn_implementation == packed_attention.NAME:
            arguments["lengths"] = packed_attention.row_lengths(micro_batch.segments, micro_batch.token_ids.shape)
        logits = self.model(
            input_ids=torch.from_numpy(micro_batch.token_ids),
            position_ids=torch.from_numpy(micro_batch.position_ids),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.from_numpy(arrays["sources"][0]),
            **arguments,
        ).logits[0]  # [N, V] in the model's dtype
        picked = (torch.from_numpy(arrays[name][0]) for name in PICKED)
        token_ids, rollout_logprobs, advantages, weights, temperature = picked
        logprobs = -F.cross_entropy(logits.float().div_(temperature[:, None]), token_ids, reduction="none")
        ratio = torch.exp(logprobs - rollout_logprobs)
        clipped = ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high)
        return -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()


def check_agreement(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> float:
    """Return the largest relative difference of losses and norms. Raises: SystemExit if it is too large, or NaN."""
    worst = float(np.max([np.abs(np.divide(found[key], expected[key]) - 1) for key in ("loss", "norm")]))
    if not worst <= tolerance:
        sys.exit(f"{name}: a loss or gradient norm differs by {worst:.2e}: not the same computation")
    return worst
