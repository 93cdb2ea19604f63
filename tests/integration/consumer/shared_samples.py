"""Cut the samples of a step into micro-batches that share prefixes, by the planner and the layout of the package."""

from collections.abc import Sequence

import numpy as np

from coati_rl import samples as package
from coati_rl.algorithms.aggregation import LossVariation, token_weight
from coati_rl.batch import MicroBatch
from coati_rl.batching.packing import pack
from tests.integration.consumer.samples import MAX_RESPONSE, Sample


def shared_micro_batches(
    samples: Sequence[Sample], *, size: int, unit: int, num_ranks: int, aggregation: LossVariation
) -> list[tuple[MicroBatch, ...]]:
    """Each rank's micro-batches, which hold `size` samples or a whole group."""
    converted = [converted_sample(sample, number, aggregation) for number, sample in enumerate(samples)]
    return pack(converted, max_samples=size, unit=unit, num_ranks=num_ranks, shares_prefixes=True)


def converted_sample(sample: Sample, number: int, aggregation: LossVariation) -> package.Sample:
    counted, start = sample.counted, sample.num_prompt
    arrays: dict[str, np.ndarray | float] = {
        "loss_weights": float(token_weight(sample.num_counted, aggregation, max_length=MAX_RESPONSE)),
        "advantages": np.broadcast_to(sample.advantage, sample.num_response)[counted].astype(np.float32),
        "temperature": sample.temperature,
        "label": sample.label,
        "policy_version": np.zeros(sample.num_counted, dtype=np.int32),
        "rollout_logprobs": sample.rollout_logprobs[counted],
    }
    if sample.old_logprobs is not None:
        arrays["old_logprobs"] = sample.old_logprobs[counted]
    return package.Sample(
        uid=str(sample.token_ids[:3]),  # the same for a prompt's samples
        number=number,
        prefix_ids=sample.token_ids[:start],
        token_ids=sample.token_ids[start:],
        loss_mask=counted,
        arrays=arrays,
    )
