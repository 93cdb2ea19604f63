"""Define the interface of an objective: the scores it needs, its targets, its losses and its metrics.

A train step scores a mini-batch with the models that `scores` names, calls `targets` to compute the losses' inputs from
the scores, accumulates the gradient of each trained model's loss, and reports `metrics`. R rows, M loss tokens per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from coati_rl.algorithms.token_selection import Reduce
from coati_rl.batch import MicroBatch
from coati_rl.protocols import LossFn, Role

Targets = tuple[tuple[MicroBatch, ...], dict[str, Tensor]]  # micro-batches, and sums reported together with the loss's


class Objective(ABC):
    """Define scores, targets, losses and metrics; the defaults suit losses that read the batch unchanged."""

    sample_arrays: ClassVar[tuple[str, ...]] = ()  # that the losses read and no model scores: samples must hold them
    unit: int = 1  # samples that packing keeps together in a micro-batch: 2 for preference pairs
    old_policy_period: int | None = None  # optimizer steps that one "old" policy serves; None: it is not scored
    updates_per_batch: int = 1  # optimizer steps on each batch

    @property
    def needs_whole_step(self) -> bool:
        """Return True if targets depend on all mini-batches of a step; see `with_whole_step`."""
        return False

    @property
    @abstractmethod
    def losses(self) -> Mapping[Role, LossFn]:
        """Return the loss of each trained model; all read the same micro-batches, and report under other names."""

    @property
    def scores(self) -> Mapping[str, Role]:
        """Return, by the name of a loss array, the model that computes its log-probabilities."""
        return {}

    @property
    def hidden_states(self) -> Mapping[str, Role]:
        """Return, by the name of a loss array, the model whose last hidden states it holds."""
        return {}

    @property
    def entropies(self) -> Mapping[str, Role]:
        """Return, by the name of a loss array, the model that computes its entropies."""
        return {}

    @property
    def roles(self) -> frozenset[Role]:
        """Return the models that the trainer must hold: those that are trained, and those that score."""
        return frozenset({*self.losses, *self.scores.values(), *self.entropies.values(), *self.hidden_states.values()})

    def rate_of(self, role: Role, step: int) -> float:
        """Return a trained model's learning rate as a multiple of the step's; 0: the model stands still."""
        return 1.0

    def num_steps(self, role: Role) -> int:
        """Return the optimizer steps of a trained model on the samples of a step."""
        return 1

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Fill the loss arrays that depend on scores; not called on ranks without the LM head."""
        return micro_batches, {}

    def with_whole_step(self, micro_batches: Sequence[MicroBatch], reduce: Reduce) -> Sequence[MicroBatch]:
        """Fill the loss arrays that depend on the global batch; called only if `needs_whole_step`.

        Args:
            micro_batches: all of this rank in the step.
            reduce: adds sums up over ranks by name; returns none on ranks without the LM head.
        """
        return micro_batches

    def end_step(self, sums: Mapping[str, float]) -> None:
        """Adapt what follows the run's measurements to a step's sums over all ranks; not called without the LM head."""
        return

    def state(self) -> dict[str, Any]:
        """Return what has been adapted, for a checkpoint, as JSON takes it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        return

    def reference_mix(self, step: int) -> float:
        """Return the share of the policy that the reference takes in after a step, counted from 0; 0: it stays."""
        return 0.0

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return the step's metrics by their names in metrics.jsonl; always the same names.

        Args:
            sums: the sums that the losses and `targets` reported, over all ranks.
            loss_scale: of the step; 0 if the step has no samples.
        Returns: None for a metric that is undefined in this step.
        """


class SingleLoss(Objective):
    """An objective that is itself the loss of its one trained model, the policy; see `LossFn`."""

    is_token_separable: bool = False

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        """Return this object as the policy's loss."""
        return {"policy": self}

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        """Return True: no evaluation by tokens shows that a whole sample is needed."""
        return True

    @abstractmethod
    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the summed loss of one micro-batch; see `LossFn`."""


def mean_of(sums: Mapping[str, float], name: str, over: str = "num_tokens") -> float | None:
    """Return sums[name] / sums[over]; None if either is missing or the divisor is 0."""
    return sums[name] / sums[over] if sums.get(over) and name in sums else None
