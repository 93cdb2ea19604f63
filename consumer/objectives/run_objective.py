"""Build the objective of a run with producers: a policy gradient, with a critic or without."""

from typing import Any

from coati_rl.algorithms.choices import TOKEN_FRACTIONS
from coati_rl.algorithms.coefficients import Coefficients, EntropyControl, KLControl
from coati_rl.algorithms.gae import TokenReturns
from coati_rl.algorithms.token_selection import SelectedTokens
from coati_rl.algorithms.value_loss import ValueLoss
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import LossFn
from consumer.objectives.actor_critic import ActorCritic
from consumer.objectives.policy_gradient import PolicyGradient

CRITIC_RATE = 10.0  # times the policy's learning rate


def policy_gradient(config: Config, coefficients: Coefficients | None = None) -> PolicyGradient:
    """Build the objective of a validated config.

    Args:
        config: of a run with producers.
        coefficients: shared with another objective of the run; None: new ones.
    Raises: ConfigError if a user's loss function fails its check.
    """
    algorithm, distillation, critic = config.algorithm, config.distillation, config.critic
    loss: LossFn = build_loss(algorithm)
    has_teacher, is_full = distillation.teacher is not None, distillation.distill_kl == "full"
    if has_teacher and is_full:
        loss = DistilledLoss(loss=loss, direction="reverse", kl_coeff=distillation.distill_coeff)
    kl: dict[str, Any] = {"kl_estimator": algorithm.kl_estimator, "kl_clamp": algorithm.kl_clamp}
    reward_kl_coeff = algorithm.kl_coeff if algorithm.kl_place == "reward" else 0.0
    common: dict[str, Any] = {
        "loss": loss,
        "has_reference": algorithm.kl_coeff > 0,
        "old_policy_period": config.sync_period if config.recomputes_old_logprobs else None,
        "updates_per_batch": algorithm.updates_per_batch,
        "teacher_coeff": distillation.distill_coeff if has_teacher and not is_full else None,
        "whitens": algorithm.whiten_advantages,
        "selection": _selection(algorithm),
        "first_kl_coeff": algorithm.kl_coeff,
        "coefficients": coefficients or make_coefficients(config),
        "reference_update": config.control.reference_moves,
    }
    if not config.algorithm.has_critic:
        return PolicyGradient(**common, **kl, reward_kl_coeff=reward_kl_coeff, distills_only=distillation.distill_only)
    rate = critic.critic_lr
    return ActorCritic(
        **common,
        value_loss=ValueLoss(clip=critic.value_clip, huber=critic.value_huber),
        token_returns=TokenReturns(
            discount=critic.gamma,
            trace=critic.gae_lambda,
            critic_trace=critic.critic_lambda,
            trace_by_length=critic.length_lambda,
            kl_coeff=reward_kl_coeff,
            **kl,
        ),
        critic_rate=CRITIC_RATE if rate is None else rate / config.optimizer.learning_rate,
        critic_updates=critic.critic_updates,
        critic_warmup=critic.critic_warmup,
    )


def make_coefficients(config: Config) -> Coefficients:
    """Return the weights of KL and entropy as the run begins."""
    control, algorithm = config.control, config.algorithm
    adapts_entropy = control.entropy_target is not None
    return Coefficients(
        entropy_coeff=algorithm.entropy_coeff,
        kl_control=KLControl(target=control.kl_target, horizon=control.kl_horizon)
        if control.kl_controller == "adaptive"
        else None,
        entropy_control=EntropyControl(
            target=control.entropy_target or 0.0, delta=control.entropy_coeff_delta, largest=control.entropy_coeff_max
        )
        if adapts_entropy
        else None,
    )


def _selection(algorithm: AlgorithmConfig) -> SelectedTokens | None:
    if algorithm.token_selection == "all":
        return None
    return SelectedTokens(
        selection=algorithm.token_selection,
        fraction=algorithm.token_fraction or TOKEN_FRACTIONS[algorithm.token_selection],
        covariance=algorithm.token_covariance,
    )
