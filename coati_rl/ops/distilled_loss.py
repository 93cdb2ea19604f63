"""Add the divergence from a teacher over the whole vocabulary to a loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from coati_rl.protocols import LossFn

Direction = Literal["reverse", "forward"]  # KL(policy || teacher), KL(teacher || policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledLoss:
    """Compute loss_coeff * loss + kl_coeff * sum_t w_t * KL_t, w_t being the batch's `loss_weights`.

    As a `LossFn` this is the first term. The second needs both models' logits and not log-probabilities alone, so the
    forward adds it where it meets this class: see `coati_rl.ops.vocabulary_kl`. It reads the loss array
    `teacher_hidden`, and adds teacher_kl_sum (unweighted, nats) to the sums.
    """

    loss: "LossFn"
    direction: Direction
    kl_coeff: float
    loss_coeff: float = 1.0  # 0: the loss is only reported

    @property
    def is_token_separable(self) -> bool:
        return self.loss.is_token_separable

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        return self.loss.is_final(sums)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the first term; see LossFn."""
        loss, sums = self.loss(logprobs, entropy, micro_batch)
        return self.loss_coeff * loss, sums | {"loss_sum": self.loss_coeff * sums["loss_sum"]}
