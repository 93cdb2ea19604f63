"""Check the settings of a critic: what forms rewards in another way is refused."""

from collections.abc import Iterator

from coati_rl.algorithms.advantage import GAE
from coati_rl.config.config import Config
from coati_rl.config.critic import CriticConfig


def critic_problems(config: Config) -> Iterator[str]:
    """Why the critic cannot be trained like this, each with a remedy."""
    critic, algorithm = config.critic, config.algorithm
    if not config.algorithm.has_critic:
        return
    if algorithm.turn_advantages is not None:
        yield (
            f"--turn-advantages {algorithm.turn_advantages:g} with --advantage-estimator {GAE}: it has the rewards of "
            "turns at their tokens; leave --turn-advantages out, --gamma discounts"
        )
    if config.distillation.distill_only:
        yield f"--distill-only with --advantage-estimator {GAE}: a critic learns from rewards; use another estimator"
    if critic.length_lambda is not None and critic.gae_lambda != CriticConfig.model_fields["gae_lambda"].default:
        yield "--length-lambda with --gae-lambda: both set lambda of the advantages; leave one of them out"
