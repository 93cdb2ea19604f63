"""Measure what a weight sync sends as the difference to the last one: share of bytes, and CPU time.

    python scripts/bench/delta_sync.py MODEL [--lr 1e-6 3e-4] [--steps 3] [--json FILE]

AdamW steps (float32 masters, betas 0.9 and 0.95, no weight decay) of a Hugging Face model on one sequence of 64 random
tokens each; after each step the bfloat16 weights are compared with those before. Figures are medians over the steps.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from coati_rl.transport import delta

BUCKET_BYTES = 32 * 2**20
BLOCK_BYTES = 64 * 2**10
SEQUENCE_LENGTH = 64


def bfloat16_bytes(model: torch.nn.Module) -> np.ndarray:
    """Return uint8[N] of all weights."""
    weights = [parameter.detach().bfloat16().view(-1) for parameter in model.parameters()]
    return torch.cat(weights).view(torch.uint8).numpy()


def share_of_changed(new: np.ndarray, base: np.ndarray, size: int) -> float:
    """Return the share of pieces of `size` bytes that differ."""
    is_other = new != base
    starts = np.arange(0, len(new), size)
    return float(np.logical_or.reduceat(is_other, starts).mean())


def cpu_seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result, and the CPU time of this process."""
    before = time.process_time()
    return function(), time.process_time() - before


def measure_update(new: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Return shares of the whole, and CPU seconds of both ends."""
    pieces = [slice(start, start + BUCKET_BYTES) for start in range(0, len(new), BUCKET_BYTES)]
    encoded, encode_s = cpu_seconds(lambda: [delta.encode(new[piece], base[piece], itemsize=2) for piece in pieces])
    packed, pack_s = cpu_seconds(lambda: [delta.encode(new[piece], None, itemsize=2) for piece in pieces])
    held = base.copy()

    def apply() -> None:
        for data, piece in zip(encoded, pieces, strict=True):
            delta.apply(data, held[piece], is_delta=True, itemsize=2)

    _, apply_s = cpu_seconds(apply)
    if held.tobytes() != new.tobytes():
        raise SystemExit("what was applied is not what was encoded")
    whole = torch.from_numpy(new)
    _, file_s = cpu_seconds(lambda: [load(save({"bucket": whole[piece]})) for piece in pieces])
    return {
        "values_changed": share_of_changed(new, base, 2),
        "blocks_changed": share_of_changed(new, base, BLOCK_BYTES),
        "delta_share": sum(map(len, encoded)) / len(new),
        "whole_zstd_share": sum(map(len, packed)) / len(new),
        "encode_s": encode_s,
        "apply_s": apply_s,
        "whole_zstd_s": pack_s,
        "whole_file_s": file_s,
    }


def measure(path: Path, lr: float, num_steps: int) -> dict[str, float]:
    """Train, and return the medians over the steps."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    base, rows = bfloat16_bytes(model), list[dict[str, float]]()
    for _ in range(num_steps):
        token_ids = torch.randint(0, model.config.vocab_size, (1, SEQUENCE_LENGTH))
        optimizer.zero_grad()
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        optimizer.step()
        new = bfloat16_bytes(model)
        rows.append(measure_update(new, base))
        base = new
    return {"mib": len(base) / 2**20, **{name: median(row[name] for row in rows) for name in rows[0]}}


def main() -> None:
    """Measure each learning rate, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"{lr:g}": measure(arguments.model, lr, arguments.steps) for lr in arguments.lr}
    for lr, figures in found.items():
        print(f"lr {lr}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
