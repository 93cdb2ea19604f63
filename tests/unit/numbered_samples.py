"""Make samples of a dataset that are known by their tokens."""

import numpy as np

from coati_rl.samples import Sample


def samples_of(number, length=4):
    """Sample i is `length` times token i; its first token is not in the loss."""
    return [
        Sample(
            uid=f"row-{i}",
            number=0,
            prefix_ids=np.empty(0, np.int32),
            token_ids=np.full(length, i, np.int32),
            loss_mask=np.arange(length) > 0,
            arrays={"loss_weights": 1.0, "temperature": 1.0},
        )
        for i in range(number)
    ]
