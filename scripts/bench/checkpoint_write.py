"""Measure how long trainers take to write a checkpoint, by their number; all must write the same files.

    OMP_NUM_THREADS=1 python scripts/bench/checkpoint_write.py [--ranks 1 4] [--layers 20] [--weights-only]

A random Qwen3 in float32 takes an optimizer step under FSDP2 and is saved, with its optimizer states. Seconds are those
of the first rank, from the call to the complete checkpoint; the median of --rounds. --weights-only leaves the states
out, as --keep-weights does.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from mfu import make_samples, take_step
from random_model import save_random_model

from coati_rl.data.packing import pack
from coati_rl.model_files.quiet import no_progress_bars
from consumer.backend import make_backend
from consumer.backend_config import BackendConfig, trained
from consumer.parallel.process_group import StoreLocation, destroy_process_group, init_process_group

TIMEOUT_S = 600.0
VOCAB = 8192


def run_rank(
    rank: int,
    ranks: int,
    model: Path,
    directory: Path,
    rounds: int,
    weights_only: bool,
    results: "Queue[list[float]]",
) -> None:
    """Train a step, and save; the first rank tells the seconds of each round."""
    torch.set_num_threads(1)
    store = StoreLocation(address="127.0.0.1", file=directory / "store")
    device = init_process_group(
        rank=rank, world_size=ranks, rendezvous=store, timeout_s=TIMEOUT_S, seed=0, device="cpu"
    )
    with no_progress_bars():
        backend = make_backend(
            BackendConfig(models={"policy": trained(model)}, plugin="fsdp2"), device=device, timeout_s=TIMEOUT_S
        )
    (micro_batch,) = pack(make_samples([64], VOCAB), max_samples=1)[0]  # the same on each rank
    take_step(backend, micro_batch, 0, num_ranks=ranks)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        backend.save(directory / "step-1", state={}, has_optimizer=not weights_only)
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        results.put(seconds)
    backend.close()
    destroy_process_group()


def measure(
    ranks: int, model: Path, directory: Path, rounds: int, weights_only: bool
) -> tuple[list[float], dict[str, str]]:
    """Return the seconds of each round, and the digests of the checkpoint's tensors by file."""
    directory.mkdir()
    context = multiprocessing.get_context("spawn")
    results: Queue[list[float]] = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, model, directory, rounds, weights_only, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    seconds = results.get(timeout=TIMEOUT_S)
    for process in processes:
        process.join()
    files = sorted((directory / "step-1").rglob("*.safetensors"))
    return seconds, {str(each.relative_to(directory)): _digest(each) for each in files}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def main() -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4], help="trainers (default 1 4)")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights-only", action="store_true", help="without the optimizer's states")
    parser.add_argument("--directory", type=Path, help="for the files; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {**vars(arguments), "torch": torch.__version__, "cpus": os.cpu_count(), "seconds": {}}
    found = dict[int, dict[str, str]]()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = Path(name) / "model"
        save_random_model(
            model, vocab=VOCAB, hidden=arguments.hidden, layers=arguments.layers, max_positions=512, dtype=torch.float32
        )
        for ranks in arguments.ranks:
            place = Path(name) / f"{ranks}-ranks"
            seconds, found[ranks] = measure(ranks, model, place, arguments.rounds, arguments.weights_only)
            figures["seconds"][ranks] = seconds
            size = sum(each.stat().st_size for each in place.rglob("*.safetensors"))
            print(
                f"{ranks} ranks: {statistics.median(seconds):6.2f} s, {size / 1e9:.2f} GB in {len(found[ranks])} files"
            )
    if len({json.dumps(digests, sort_keys=True) for digests in found.values()}) > 1:
        different = [name for name in found[arguments.ranks[0]] if len({each.get(name) for each in found.values()}) > 1]
        sys.exit(f"the files are not the same: {different}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
