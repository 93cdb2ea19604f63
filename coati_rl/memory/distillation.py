"""Forecast what trainers hold for the divergence from a teacher over the whole vocabulary. Bytes throughout."""

from typing import Any

from coati_rl.config.config import Config
from coati_rl.config.held_models import remote_models
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.memory.activations import FLOAT32, MicroBatchSize, chunk_rows, item_bytes
from coati_rl.memory.model_shape import model_shape
from coati_rl.types import Device


def teacher_loss_bytes(
    config: TrainingConfig, teacher: Any, size: MicroBatchSize, precision: str, device: Device
) -> int:
    """Return what a rank needs beside the policy's LM head; 0 if the loss has no such divergence.

    V vocabulary of a tensor-parallel rank, G hidden size of the teacher, N loss tokens, C tokens of a chunk. The
    teacher's hidden states, e N G, as the loss has them and as its head takes them; its logits of a chunk in float32,
    4 C V, and with the forward divergence their difference from the policy's, as much again: see `ops.vocabulary_kl`.
    Where the teacher is on other devices its head is here, e V G.

    Args:
        config: of the job.
        teacher: its transformers config; None: there is none.
        size: of the largest micro-batch.
        precision: of the training.
        device: of the trainers.
    """
    is_reverse = isinstance(config, Config) and config.distillation.distill_kl == "full"
    is_forward = isinstance(config, OfflineConfig)
    if teacher is None or not (is_reverse or is_forward):
        return 0
    shape = model_shape(teacher, tensor_parallel_size=config.parallel.tensor_parallel_size)
    logits = FLOAT32 * chunk_rows(shape.vocabulary, size.loss_tokens, device) * shape.vocabulary
    states = 2 * item_bytes(precision) * size.loss_tokens * shape.hidden
    head = item_bytes(precision) * shape.vocabulary * shape.hidden if "teacher" in remote_models(config) else 0
    return logits * (2 if is_forward else 1) + states + head
