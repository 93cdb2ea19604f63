"""Identify the samples of a job on a dataset, so that a run is resumed on the same ones."""

import numpy as np
import xxhash

from coati_rl.samples import Sample

_ARRAYS_OF_ALL = {"loss_weights", "temperature"}


class SampleDigest:
    """Compute the xxh3-128 digest of tokens and masks, and of arrays that not all samples have, such as labels."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, sample: Sample) -> None:
        """Add the next sample."""
        for each in (sample.prefix_ids, sample.token_ids, sample.loss_mask):
            self._digest.update(each.tobytes())
        for name in sorted(sample.arrays.keys() - _ARRAYS_OF_ALL):
            self._digest.update(np.asarray(sample.arrays[name]).tobytes())

    @property
    def text(self) -> str:
        """Return the digest of the samples added so far."""
        return self._digest.hexdigest()
