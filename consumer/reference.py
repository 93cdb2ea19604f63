"""The reference model of the KL penalty: a frozen plain copy of the start model, outside every training wrapper."""

from pathlib import Path

import torch
from torch import Tensor

from consumer.policy_model import PolicyInput, load_policy, policy_forward


class Reference:
    """Scores micro-batches under weights that never change."""

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._model = load_policy(model_dir, dtype=dtype).requires_grad_(False).to(device)

    @torch.no_grad()
    def score(self, inputs: PolicyInput) -> Tensor:
        """float32[R, L]: log-probabilities of the sampled tokens at the sampling temperature, 0 elsewhere."""
        return policy_forward(self._model, inputs)[0]
