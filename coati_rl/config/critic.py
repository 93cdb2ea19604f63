"""Set the critic of --advantage-estimator gae: how advantages and returns are formed, and how the critic is trained."""

from typing import Any, ClassVar

from coati_rl.config.fields import Needs, Section, experiment
from coati_rl.config.user_paths import OptionalPath


def gamma_field() -> Any:
    """Return the field of the discount, which a critic's job has too."""
    return experiment(1.0, "Discount of the rewards of later tokens.", ge=0, le=1)


def value_huber_field() -> Any:
    """Return the field of Huber's loss of a value, which a critic's job has too."""
    return experiment(None, "Error of a value from which the critic's loss is linear (Huber); None: squared.", gt=0)


class CriticConfig(Section):
    """PPO's critic: a value of each token's state, learned beside the policy."""

    NEEDS: ClassVar[Needs] = {"advantage_estimator": ("gae",)}

    gamma: float = gamma_field()
    gae_lambda: float = experiment(
        0.95, "Lambda of advantages: 1 is the sum of rewards less the value, 0 the critic's estimate alone.", ge=0, le=1
    )
    critic_lambda: float | None = experiment(
        None, "Lambda of the returns that the critic learns; default: --gae-lambda.", ge=0, le=1
    )
    length_lambda: float | None = experiment(
        None,
        "Lambda of advantages by a sample's N tokens, 1 - 1 / (ALPHA * N) (VAPO); None: --gae-lambda.",
        metavar="ALPHA",
        gt=0,
    )
    critic_model: OptionalPath = experiment(
        None,
        "Start of the critic: a model directory or hub id with the policy's tokens, or a directory of coati-rl rm or "
        "coati-rl value; default: --model.",
        metavar="MODEL",
    )
    critic_lr: float | None = experiment(
        None, "Peak learning rate of the critic, with the policy's schedule; default: ten times --learning-rate.", gt=0
    )
    critic_updates: int = experiment(
        1, "Optimizer steps of the critic on the samples of each of the policy's; as many forwards and backwards.", ge=1
    )
    critic_warmup: int = experiment(0, "First optimizer steps, in which the critic alone is trained.", ge=0)
    value_clip: float | None = experiment(
        0.2, "The critic's loss is clipped where a value is further than this from that before the update.", gt=0
    )
    value_huber: float | None = value_huber_field()
