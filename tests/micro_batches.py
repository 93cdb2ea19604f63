"""Build micro-batches from arrays with a value for every token of a row."""

import numpy as np

from coati_rl.batch import MicroBatch


def grid_micro_batch(
    *, token_ids: np.ndarray, position_ids: np.ndarray, sample_index: np.ndarray, **arrays: np.ndarray
) -> MicroBatch:
    """Each array is [R, L], `loss_mask` among them: loss token t of a row is its token t, predicted by the one before.

    `sample_index` is -1 on padding, and the samples of a row lie one after another.
    """
    rows, length = token_ids.shape
    segments = []
    for row, samples in enumerate(sample_index):
        starts = np.flatnonzero(np.diff(samples, prepend=samples[0] - 1))
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            if samples[start] >= 0:
                segments.append((row, start, end - start, -1))
    sources = np.broadcast_to(np.arange(-1, length - 1), (rows, length))
    own = {"token_ids": token_ids, "sources": sources, "sample_index": sample_index}
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segments=np.array(segments, dtype=np.int32).reshape(-1, 4),
        loss_arrays={**own, **arrays},
    )
