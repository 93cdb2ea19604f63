"""Optimise policy and critic together: PPO. The critic's values make advantages of the rewards of single tokens.

Values are scored by the critic before its update, on the micro-batches of the policy, and are no log-probabilities: no
temperature divides them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coati_rl.algorithms.distillation import add_teacher_advantages
from coati_rl.algorithms.gae import TokenReturns
from coati_rl.algorithms.value_loss import ValueLoss, value_metrics
from coati_rl.batch import MicroBatch
from coati_rl.protocols import LossFn, Role
from consumer.objectives.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class ActorCritic(PolicyGradient):
    """Compute the targets of both models; the losses are `PolicyLoss` and `ValueLoss`."""

    value_loss: ValueLoss
    token_returns: TokenReturns
    critic_rate: float = 1.0  # learning rate of the critic, as a multiple of the policy's
    critic_updates: int = 1  # optimizer steps of the critic on the samples of a step
    critic_warmup: int = 0  # first optimizer steps, in which the policy stands still

    sample_arrays = (*PolicyGradient.sample_arrays, "token_rewards", "is_cut")

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        """Return both losses."""
        return {"policy": self.policy_loss, "value": self.value_loss}

    @property
    def scores(self) -> Mapping[str, Role]:
        """Return the models that compute log-probabilities, and the critic, which computes old_values."""
        return {**super().scores, "old_values": "value"}

    def rate_of(self, role: Role, step: int) -> float:
        """Return a model's learning rate as a multiple of the step's; 0: the model stands still."""
        if role == "value":
            return self.critic_rate
        return float(step >= self.critic_warmup)

    def num_steps(self, role: Role) -> int:
        """Return the optimizer steps of a model on the samples of a step."""
        return self.critic_updates if role == "value" else 1

    def _with_advantages(self, micro_batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        returns = self.token_returns
        if self.coefficients.kl_scale != 1:
            returns = dataclasses.replace(returns, kl_coeff=returns.kl_coeff * self.coefficients.kl_scale)
        micro_batch, sums = returns(micro_batch)
        if self.teacher_coeff is not None:
            micro_batch, terms = add_teacher_advantages(micro_batch, coeff=self.teacher_coeff)
            sums = sums | terms
        return micro_batch, sums

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return the policy's metrics and the critic's; see docs/metrics.md."""
        return super().metrics(sums, loss_scale=loss_scale) | value_metrics(sums, loss_scale=loss_scale)
