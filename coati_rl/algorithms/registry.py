"""From a configuration to the functions it names: advantage estimator and loss, built in or a user's own."""

import inspect

import numpy as np
import torch

from coati_rl.algorithms.advantage import ADVANTAGE_ESTIMATORS, Estimator, group_advantages
from coati_rl.algorithms.loss import PolicyLoss, TermsFn
from coati_rl.config.config import Config
from coati_rl.errors import ConfigError
from coati_rl.plugins import is_plugin, load_function


def load_estimator(name: str) -> Estimator:
    """One of ADVANTAGE_ESTIMATORS, or a user's: float64[N] rewards of a group's valid samples to float64[N].

    Raises: ConfigError if it cannot be loaded or fails on a group of two.
    """
    if not is_plugin(name):
        return ADVANTAGE_ESTIMATORS[name]
    estimator: Estimator = load_function(name, flag="--advantage-estimator")
    try:
        group_advantages(np.array([1.0, 0.0]), np.array([True, True]), estimator=estimator)
    except Exception as error:
        raise ConfigError(
            f"--advantage-estimator {name}: fails on rewards [1, 0]: {type(error).__name__}: {error}; it takes "
            "float64[N] rewards of a group and returns as many advantages"
        ) from error
    return estimator


def load_terms(name: str) -> TermsFn:
    """A user's policy term: (logprobs, old_logprobs, advantages, micro_batch) to float32[R, L].

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


def build_loss(config: Config) -> PolicyLoss:
    """The loss of a checked configuration. Raises: ConfigError for a function of the user's that does not work."""
    loss = PolicyLoss(
        policy_loss=config.policy_loss,
        ratio_level=config.ratio_level,
        clip_low=config.clip_eps_low,
        clip_high=config.clip_eps_high,
        clip_dual=config.clip_dual,
        kl_coeff=config.kl_coeff if config.kl_place == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        entropy_coeff=config.entropy_coeff,
        correction=config.off_policy_correction,
        correction_low=config.off_policy_low or 0.0,
        correction_high=config.off_policy_high or 1.0,
        skip_threshold=config.skip_threshold,
        terms_fn=load_terms(config.policy_loss) if is_plugin(config.policy_loss) else None,
    )
    if loss.terms_fn is not None:
        _try_out(loss, config.policy_loss)
    return loss


def _try_out(loss: PolicyLoss, name: str) -> None:
    """Evaluate a user's loss on two tokens, with gradient."""
    shape = (1, 3)
    zeros = torch.zeros(shape)
    arrays = {
        "loss_mask": torch.tensor([[False, True, True]]),
        "loss_weights": torch.tensor([[0.0, 0.5, 0.5]]),
        "advantages": torch.tensor([[0.0, 1.0, 1.0]]),
        "sample_index": torch.zeros(shape, dtype=torch.int32),
        "position_ids": torch.tensor([[0, 1, 2]]),
        "token_ids": torch.zeros(shape, dtype=torch.int64),
        "policy_version": torch.zeros(shape, dtype=torch.int32),
        "temperature": torch.ones(shape),
        "trainer_version": torch.tensor(0),
        **dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs"), zeros),
    }
    logprobs = torch.zeros(shape, requires_grad=True)
    try:
        value, _ = loss(logprobs, torch.zeros(shape), arrays)
        value.backward()  # type: ignore[no-untyped-call]
        is_usable = logprobs.grad is not None and bool(torch.isfinite(logprobs.grad).all())
    except Exception as error:
        raise ConfigError(f"--policy-loss {name}: fails on two tokens: {type(error).__name__}: {error}") from error
    if not is_usable:
        raise ConfigError(f"--policy-loss {name}: gives logprobs no finite gradient; use the logprobs it is given")
