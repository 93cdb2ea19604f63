"""Measure the host memory of a node while its trainers load a model, by layout.

    OMP_NUM_THREADS=1 python scripts/bench/load_memory.py [--model DIR] [--ranks 2 4] [--precision bf16] [--json FILE]

Each rank loads and shards the model as a trainer, in a fresh process on the CPU. Out, as multiples of the model's
files, summed over the ranks and beyond what each held before (libraries):

    peak     memory of their own at its largest
    after    what is left of it when the model is loaded: weights and, in bf16, their float32 masters
    passing  peak - after: what a node with GPUs, where the rest is on the GPUs, needs beside the page cache
    mapped   the files' pages that the ranks have mapped, which they share and the kernel can drop
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from random_model import save_random_model

from coati_rl.model_files.quiet import no_progress_bars
from consumer.backend import make_backend
from consumer.backend_config import BackendConfig, trained
from consumer.environment import memory_environment
from consumer.models.policy_model import Precision
from consumer.parallel.process_group import destroy_process_group, init_process_group
from consumer.parallel.store_location import StoreLocation

TIMEOUT_S = 600.0
PAUSE_S = 0.02  # between two samples
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"plugin": "fsdp2"},
    "zero1": {"zero_stage": 1},  # in bf16 alone
    "tp": {},  # over all ranks
    "pp": {},
}


def settings_of(layout: str, ranks: int) -> dict[str, Any]:
    """Return the backend's settings."""
    return {**LAYOUTS[layout], **({f"{layout}_size": ranks} if layout in ("tp", "pp") else {})}


def memory_of(process: int) -> dict[str, int]:
    """Return a process's own memory, and its share of mapped files, in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    found = {line.split()[0].rstrip(":"): 1024 * int(line.split()[1]) for line in lines}
    return {"own": found["Pss_Anon"] + found["Pss_Shmem"], "mapped": found["Pss_File"]}


def run_rank(
    rank: int, layout: str, ranks: int, store: StoreLocation, model: Path, precision: Precision, events: list[Event]
) -> None:
    """Load the model on one rank: `events` say that libraries are loaded, begin, loaded, end."""
    torch.set_num_threads(1)
    device = init_process_group(
        rank=rank, world_size=ranks, rendezvous=store, timeout_s=TIMEOUT_S, seed=0, device="cpu"
    )
    import consumer.parallel.fsdp
    import consumer.parallel.hybrid  # noqa: F401  (libraries, before what they hold is read)

    is_ready, begin, is_loaded, end = events
    is_ready.set()
    begin.wait()
    config = BackendConfig(models={"policy": trained(model)}, precision=precision, **settings_of(layout, ranks))
    with no_progress_bars():
        backend = make_backend(config, device=device, timeout_s=TIMEOUT_S)
    is_loaded.set()
    end.wait()
    backend.close()
    destroy_process_group()


def measure(layout: str, ranks: int, model: Path, precision: Precision) -> dict[str, float]:
    """Load the model on all ranks of a layout. Returns: bytes, summed over the ranks, and seconds."""
    context = multiprocessing.get_context("spawn")
    os.environ.update(memory_environment("cpu", LAYOUTS[layout].get("plugin", "hybrid")))
    with tempfile.TemporaryDirectory() as name:
        store = StoreLocation(address="127.0.0.1", file=Path(name) / "store")
        begin, end = context.Event(), context.Event()
        ready = [context.Event() for _ in range(ranks)]
        loaded = [context.Event() for _ in range(ranks)]
        processes = [
            context.Process(
                target=run_rank,
                args=(rank, layout, ranks, store, model, precision, [ready[rank], begin, loaded[rank], end]),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        if not all(event.wait(TIMEOUT_S) for event in ready):
            sys.exit(f"{layout}: a rank did not start")
        pids = [process.pid or 0 for process in processes]
        held = [memory_of(pid) for pid in pids]
        before = {key: sum(one[key] for one in held) for key in ("own", "mapped")}
        begin.set()
        started, samples = time.monotonic(), list[dict[str, int]]()
        while not all(event.is_set() for event in loaded):
            if any(process.exitcode is not None for process in processes):
                sys.exit(f"{layout}: a rank failed")
            each = [memory_of(pid) for pid in pids]
            samples.append({key: sum(one[key] for one in each) for key in ("own", "mapped")})
            time.sleep(PAUSE_S)
        seconds = time.monotonic() - started
        after = sum(memory_of(pid)["own"] for pid in pids) - before["own"]
        end.set()
        for process in processes:
            process.join()
    peak = max(max(each["own"] for each in samples) - before["own"], after)
    return {
        "peak": peak,
        "after": after,
        "passing": peak - after,
        "mapped": max(each["mapped"] for each in samples) - before["mapped"],
        "seconds": seconds,
    }


def main() -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; without it a random Qwen3 in --precision")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="processes (default 2)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="of the training (default bf16)")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size without --model (default 576)")
    parser.add_argument("--layers", type=int, default=30, help="decoder layers without --model (default 30)")
    parser.add_argument("--vocab", type=int, default=49152, help="vocabulary without --model (default 49152)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {**vars(arguments), "torch": torch.__version__, "cpus": os.cpu_count(), "loads": []}
    with tempfile.TemporaryDirectory() as name, no_progress_bars():
        model = arguments.model or Path(name)
        if arguments.model is None:
            dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
            sizes = {"vocab": arguments.vocab, "hidden": arguments.hidden, "layers": arguments.layers}
            save_random_model(model, **sizes, max_positions=512, dtype=dtype)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        print(f"files {size / 2**20:.0f} MiB; times the files:")
        print(f"{'layout':8}{'ranks':>6}{'peak':>8}{'after':>8}{'passing':>9}{'mapped':>8}{'seconds':>9}")
        for ranks in arguments.ranks:
            for layout in arguments.layout:
                if layout == "zero1" and arguments.precision == "fp32":
                    continue  # ColossalAI's ZeRO takes no float32
                found = measure(layout, ranks, model, arguments.precision)
                figures["loads"].append({"layout": layout, "ranks": ranks, "files": size, **found})
                peak, after, passing, mapped = (found[key] / size for key in ("peak", "after", "passing", "mapped"))
                print(
                    f"{layout:8}{ranks:6}{peak:8.2f}{after:8.2f}{passing:9.2f}{mapped:8.2f}{found['seconds']:9.1f}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
