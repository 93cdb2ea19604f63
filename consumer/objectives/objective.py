"""Define what an objective tells the train step: the scores it needs, its targets, its loss, its metrics.

A train step scores a mini-batch with the models that `scores` names, lets `targets` turn the scores into the loss
arrays that the loss reads, accumulates the gradient of `loss_fn`, and reports `metrics`. R rows, M loss tokens per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.protocols import LossFn, Role

Targets = tuple[tuple[MicroBatch, ...], dict[str, Tensor]]  # micro-batches, and sums to report with the loss's


class Objective(ABC):
    """Describe one; the defaults are those of a loss that reads the batch as it comes."""

    loss_fn: LossFn
    unit: int = 1  # samples that packing keeps together in a micro-batch: 2 for preference pairs
    scores: Mapping[str, Role] = {}  # loss array -> the model whose log-probabilities it holds
    old_policy_period: int | None = None  # optimizer steps that one "old" policy serves; None: it is not scored
    needs_whole_step: bool = False  # targets depend on sums over all mini-batches of the step: it is trained at its end

    @property
    def roles(self) -> frozenset[Role]:
        """Return the models that the trainer holds for it: the policy, and those that score."""
        return frozenset({"policy", *self.scores.values()})

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Fill the loss arrays that follow from scores; not called on ranks without the LM head, which have none."""
        return micro_batches, {}

    def step_sums(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Return what `with_step_sums` needs of a rank's micro-batches, to be reduced over ranks by name."""
        return {}

    def with_step_sums(self, micro_batch: MicroBatch, sums: Mapping[str, float]) -> MicroBatch:
        """Fill the loss arrays that follow from sums over the global batch; only if `needs_whole_step`."""
        return micro_batch

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Form the step's metrics by their names in metrics.jsonl; always the same names.

        Args:
            sums: what the loss and `targets` reported, over all ranks.
            loss_scale: of the step; 0: it has no samples.
        Returns: None for a value where there is nothing to form it of.
        """


def mean_of(sums: Mapping[str, float], name: str, over: str = "num_tokens") -> float | None:
    """Return sums[name] / sums[over]; None if either is missing or there is nothing to divide by."""
    return sums[name] / sums[over] if sums.get(over) and name in sums else None
