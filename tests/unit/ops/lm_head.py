"""Provide a small LM head with a few tokens, and reference values from its full logits in float64."""

import numpy as np
import torch
from torch import Tensor

R, L, H, V = 2, 6, 8, 11


def make_inputs(seed: int = 0, *, bias: bool = False, vocabulary: int = V) -> dict[str, Tensor | None]:
    """Arguments of `token_logprobs`; 7 of 12 tokens are asked for."""
    rng = np.random.default_rng(seed)
    mask = np.array([[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 1, 1]], dtype=bool)
    return {
        "hidden": torch.tensor(rng.normal(size=(R, L, H)), dtype=torch.float32),
        "weight": torch.tensor(rng.normal(size=(vocabulary, H)), dtype=torch.float32),
        "bias": torch.tensor(rng.normal(size=vocabulary), dtype=torch.float32) if bias else None,
        "token_ids": torch.tensor(rng.integers(0, vocabulary, (R, L))),
        "sources": torch.arange(-1, L - 1).expand(R, L),
        "token_mask": torch.tensor(mask),
        "temperature": torch.tensor(rng.uniform(0.5, 1.5, (R, L)), dtype=torch.float32),
    }


def full_logprobs(inputs: dict[str, Tensor | None]) -> Tensor:
    """float64[R, L - 1, V]: log softmax of all logits, by torch and with its gradient."""
    logits = inputs["hidden"][:, :-1].double() @ inputs["weight"].double().T
    if inputs["bias"] is not None:
        logits = logits + inputs["bias"].double()
    return torch.log_softmax(logits / inputs["temperature"][:, 1:, None].double(), dim=-1)


def chosen_logprobs(inputs: dict[str, Tensor | None]) -> Tensor:
    """float64[R, L]: 0 where not asked for."""
    chosen = full_logprobs(inputs).gather(-1, inputs["token_ids"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0)) * inputs["token_mask"]


def chosen_entropy(inputs: dict[str, Tensor | None]) -> Tensor:
    """float64[R, L]: 0 where not asked for."""
    full = full_logprobs(inputs)
    return torch.nn.functional.pad(-(full.exp() * full).sum(dim=-1), (1, 0)) * inputs["token_mask"]


def shared_sources(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The same tokens, but in each row one hidden state predicts two of them or three, as where sequences fork."""
    return {**inputs, "sources": torch.tensor([[0, 0, 2, 2, 2, 0], [0, 5, 0, 5, 1, 0]])}


def gathered(inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, float64[R, L], from full logits at each token's source; 0 if not asked for."""
    rows = torch.arange(R)[:, None]
    logits = inputs["hidden"][rows, inputs["sources"]].double() @ inputs["weight"].double().T + inputs["bias"].double()
    full = torch.log_softmax(logits / inputs["temperature"][..., None].double(), dim=-1)
    logprobs = full.gather(-1, inputs["token_ids"][..., None]).squeeze(-1)
    return logprobs * inputs["token_mask"], -(full.exp() * full).sum(dim=-1) * inputs["token_mask"]


def make_micro_batch(inputs: dict[str, Tensor | None], seed: int = 1) -> dict[str, Tensor]:
    """Make the arrays of a loss, close to the log-probabilities, so that some ratios are clipped and some are not."""
    rng = np.random.default_rng(seed)
    exact = chosen_logprobs(inputs).detach()

    def near() -> Tensor:
        return (exact + torch.tensor(rng.normal(scale=0.3, size=(R, L)))).float()

    return {
        "token_ids": inputs["token_ids"],
        "sources": inputs["sources"],
        "loss_mask": inputs["token_mask"],
        "temperature": inputs["temperature"],
        "loss_weights": torch.tensor(rng.uniform(0.1, 0.3, (R, L)), dtype=torch.float32),
        "advantages": torch.tensor(rng.normal(size=(R, L)), dtype=torch.float32),
        "rollout_logprobs": near(),
        "old_logprobs": near(),
        "ref_logprobs": near(),
        "policy_version": torch.tensor(rng.integers(3, 5, (R, L)), dtype=torch.int32),
        "trainer_version": torch.tensor(4),
    }


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
