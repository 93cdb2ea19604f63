"""Select the samples of a step that trainers compute, where a sample of advantage 0 has no gradient.

Such a sample stays in all counts and denominators, but is neither scored nor run forward and backward. Entropy, the
trainer/engine log-probability mismatch and the other means over tokens need samples: where those with a gradient are
too few, others are drawn at random and computed for these means alone. They are packed apart, so that the gradient of
the rest does not depend on them in a single bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.samples import Sample

MIN_SAMPLES = 8  # computed in a step, if it has as many; of all dp ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionSettings:
    """Hold how much a step computes at least, and the seed of what is drawn for it."""

    min_tokens: int  # loss tokens of a step, of all dp ranks
    seed: int


class SampleSelection:
    """Select samples of one optimizer step, mini-batch by mini-batch."""

    def __init__(self, settings: SelectionSettings | None, *, step: int) -> None:
        """Begin a step; without settings every sample is computed."""
        self._settings = settings
        self._step = step
        self._num_mini_batches = 0
        self._num_samples = 0  # computed, of the mini-batches so far
        self._num_tokens = 0  # of these, in the loss

    def split(self, samples: Sequence[Sample], *, fraction: float) -> tuple[list[Sample], list[Sample]]:
        """Return the samples that have a gradient, and those that are computed for the metrics alone, both in order.

        Args:
            samples: of the next mini-batch.
            fraction: of the step's prompts that have been added with it, in (0, 1]: the same fraction of the least
                numbers is computed.
        """
        if self._settings is None:
            return list(samples), []
        trained = [sample for sample in samples if _has_gradient(sample)]
        others = [sample for sample in samples if not _has_gradient(sample)]
        for sample in trained:
            self._count(sample)
        rng = np.random.default_rng((self._settings.seed, self._step, self._num_mini_batches))
        self._num_mini_batches += 1
        drawn = list[int]()
        for index in rng.permutation(len(others)).tolist():
            enough_tokens = self._num_tokens >= fraction * self._settings.min_tokens
            if enough_tokens and self._num_samples >= fraction * MIN_SAMPLES:
                break
            drawn.append(index)
            self._count(others[index])
        return trained, [others[index] for index in sorted(drawn)]

    def _count(self, sample: Sample) -> None:
        self._num_samples += 1
        self._num_tokens += sample.num_loss_tokens


def _has_gradient(sample: Sample) -> bool:
    """Return True if the advantage of any loss token is not 0; turns may have their own."""
    return bool(np.any(sample.arrays["advantages"]))
