"""Measure what padding and waiting cost at the lengths that rollouts have, by way of packing.

    python scripts/bench/packing.py [--samples 4096] [--seed 0] [--json FILE]

In: lengths from a lognormal distribution (mu 4.2, sigma 0.8), cut at 512 tokens. Out: a table of ratios to the samples'
tokens, so that 1 is no waste; the micro-batches are those that the coordinator makes. Lockstep: at its k-th micro-batch
every dp rank waits for the slowest, so that each costs what the largest does.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.batch import MicroBatch
from coati_rl.data.packing import pack
from coati_rl.samples import Sample

MU, SIGMA, LONGEST, BUDGET = 4.2, 0.8, 512, 1024
MINI_BATCHES = (512, 64)  # samples; also measured: all in one


def make_samples(count: int, seed: int) -> list[Sample]:
    """Samples that are all prompt: packing looks at lengths alone."""
    lengths = np.random.default_rng(seed).lognormal(MU, SIGMA, count).round().clip(1, LONGEST).astype(np.int64)
    return [
        Sample(
            uid=f"bench-{number}",
            number=0,
            prefix_ids=np.ones(length, dtype=np.int32),
            token_ids=np.empty(0, dtype=np.int32),
            loss_mask=np.empty(0, dtype=bool),
            arrays={},
        )
        for number, length in enumerate(lengths)
    ]


def lockstep(ranks: Sequence[Sequence[MicroBatch]]) -> int:
    """Tokens that all ranks could compute while each waits for the slowest, padding included."""
    return sum(len(ranks) * max(m.token_ids.size for m in together) for together in zip(*ranks, strict=True))


def measure(samples: Sequence[Sample], size: int) -> dict[str, float]:
    """Name -> ratio to the samples' tokens, when mini-batches of so many samples are packed one by one."""
    tokens = sum(map(len, samples))

    def packed(**options: Any) -> list[list[MicroBatch]]:
        """By rank, all mini-batches one after another."""
        parts = [pack(samples[start : start + size], **options) for start in range(0, len(samples), size)]
        return [[m for part in parts for m in part[rank]] for rank in range(len(parts[0]))]

    def computed(**options: Any) -> float:
        return sum(m.token_ids.size for m in packed(one_sample_per_row=True, **options)[0]) / tokens

    bound = {"max_samples": size, "max_tokens": BUDGET}
    ratios = {
        "padded to the longest of all": len(samples) * max(map(len, samples)) / tokens,
        "a row per sample, sorted, -tmbs 16": computed(max_samples=16),
        f"a row per sample, sorted, {BUDGET} tokens": computed(**bound),
        f"packed, micro-batches x {BUDGET} tokens": len(packed(**bound)[0]) * BUDGET / tokens,
    }
    for dp in (2, 4):
        ratios[f"packed, -tmbs 16, lockstep of dp {dp}"] = lockstep(packed(num_ranks=dp, max_samples=16)) / tokens
        ratios[f"packed, {BUDGET} tokens, lockstep of dp {dp}"] = lockstep(packed(num_ranks=dp, **bound)) / tokens
    return ratios


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Padding and waiting of the coordinator's micro-batches.")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    samples = make_samples(arguments.samples, arguments.seed)
    begin = time.perf_counter()
    pack(samples, max_samples=len(samples), max_tokens=BUDGET)
    seconds = time.perf_counter() - begin
    sizes = sorted({len(samples), *(size for size in MINI_BATCHES if size < len(samples))}, reverse=True)
    ratios = {size: measure(samples, size) for size in sizes}
    print(f"{'samples per mini-batch':<44}" + "".join(f"{size:>8}" for size in sizes))
    for name in ratios[sizes[0]]:
        print(f"{name:<44}" + "".join(f"{ratios[size][name]:8.3f}" for size in sizes))
    print(f"{'seconds to pack the largest':<44}{seconds:8.3f}")
    if arguments.json:
        figures = {"samples": len(samples), "seed": arguments.seed, "pack_s": seconds, "ratios": ratios}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
