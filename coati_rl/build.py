"""Build the loss that a configuration names, built in or a user's own."""

import dataclasses
import inspect

import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss, TermsFn
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.errors import ConfigError
from coati_rl.plugins import is_plugin, load_function


def load_terms(name: str) -> TermsFn:
    """Load a user's policy term: (logprobs, old_logprobs, advantages, micro_batch) to float32[R, M].

    Raises: ConfigError if it cannot be loaded or takes other arguments.
    """
    terms: TermsFn = load_function(name, flag="--policy-loss")
    try:
        inspect.signature(terms).bind(*range(4))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--policy-loss {name}: is called with (logprobs, old_logprobs, advantages, micro_batch): {error}"
        ) from error
    return terms


def build_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Build the loss of checked settings. Raises: ConfigError for a user's function that does not work."""
    loss = PolicyLoss(
        policy_loss=algorithm.policy_loss,
        ratio_level=algorithm.ratio_level,
        clip_low=algorithm.clip_eps_low,
        clip_high=algorithm.clip_eps_high,
        clip_dual=algorithm.clip_dual,
        sapo_positive=algorithm.sapo_temperature_pos,
        sapo_negative=algorithm.sapo_temperature_neg,
        vespo_positive=algorithm.vespo_positive,
        vespo_negative=algorithm.vespo_negative,
        kl_coeff=algorithm.kl_coeff if algorithm.kl_place == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        kl_clamp=algorithm.kl_clamp,
        kl_has_ratio=algorithm.kl_bias_correction,
        entropy_coeff=algorithm.entropy_coeff,
        hold_coeff=algorithm.kl_cov_coeff,
        correction=algorithm.off_policy_correction,
        correction_low=algorithm.off_policy_low or 0.0,
        correction_high=algorithm.off_policy_high or 1.0,
        skip_threshold=algorithm.skip_threshold,
        drift_threshold=algorithm.off_policy_mask_threshold,
        terms_fn=load_terms(algorithm.policy_loss) if is_plugin(algorithm.policy_loss) else None,
    )
    if loss.terms_fn is not None:
        _try_out(loss, algorithm.policy_loss, has_reference=algorithm.kl_coeff > 0)
    return loss


def _try_out(loss: PolicyLoss, name: str, *, has_reference: bool) -> None:
    """Evaluate a user's loss on three tokens, with gradient; also token by token, if it is token-separable."""
    alone = dataclasses.replace(loss, kl_coeff=0.0, entropy_coeff=0.0)  # these have gradients of their own
    arrays = _three_tokens(has_reference=has_reference)
    places = [slice(1, 4)] + ([slice(place, place + 1) for place in (1, 2, 3)] if loss.is_token_separable else [])
    try:
        on_policy = _gradient_at(alone, arrays, places[0], log_ratio=0.0)
        gradients = [_gradient_at(alone, arrays, place, log_ratio=0.02) for place in places]
    except Exception as error:
        raise ConfigError(f"--policy-loss {name}: fails on three tokens: {type(error).__name__}: {error}") from error
    whole, *parts = gradients
    if not torch.isfinite(on_policy + whole).all() or not whole.any():
        raise ConfigError(
            f"--policy-loss {name}: gives logprobs no finite gradient; compute the terms from the argument logprobs"
        )
    if parts and not torch.allclose(torch.cat(parts), whole):
        raise ConfigError(
            f"--policy-loss {name}: has is_token_separable, but a token's gradient depends on the other tokens; "
            "remove that attribute"
        )


def _three_tokens(*, has_reference: bool) -> dict[str, Tensor]:
    """Return one row, padding and three tokens of a response, with the arrays that every micro-batch has.

    Where trainers score `old_logprobs` too, a loss reads them from its argument.
    """
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -0.5]])
    of_reference = {"ref_logprobs": logprobs - 0.01} if has_reference else {}
    return {
        "loss_mask": torch.tensor([[False, True, True, True]]),
        "loss_weights": torch.tensor([[0.0, 0.5, 0.5, 0.5]]),
        "advantages": torch.tensor([[0.0, 1.0, -0.5, 1.0]]),
        "sample_index": torch.zeros((1, 4), dtype=torch.int32),
        "token_ids": torch.zeros((1, 4), dtype=torch.int64),
        "sources": torch.tensor([[0, 0, 1, 2]]),
        "policy_version": torch.zeros((1, 4), dtype=torch.int32),
        "temperature": torch.ones((1, 4)),
        "rollout_logprobs": logprobs,
        **of_reference,
    }


def _gradient_at(loss: PolicyLoss, arrays: dict[str, Tensor], places: slice, *, log_ratio: float) -> Tensor:
    """Return float32[N], the loss's gradient at these places alone; a single token has no sample_index."""
    chosen = {name: array[:, places] for name, array in arrays.items()}
    if chosen["loss_mask"].numel() == 1:
        del chosen["sample_index"]
    logprobs = (chosen["rollout_logprobs"] + log_ratio).requires_grad_()
    value, _ = loss(logprobs, torch.zeros_like(logprobs), {**chosen, "trainer_version": torch.tensor(0)})
    (gradient,) = torch.autograd.grad(value, logprobs)
    return gradient.flatten()
