"""Set the loss of a reward model that is trained on pairs of responses."""

from coati_rl.config.fields import Section, experiment


class RewardModelConfig(Section):
    """Bradley-Terry loss of a reward model; a row's margin is in its column `margin`."""

    center_rewards_coefficient: float = experiment(
        0.0, "Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around 0; 0.01 is usual.", ge=0
    )
