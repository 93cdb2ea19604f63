"""Measure the coordinator with its ledger and files against simulated producers and trainers.

    python scripts/bench/coordinator.py ledger [--rounds 5]       # a step of the quickstart's size, with it and without
    python scripts/bench/coordinator.py scale [--scales 1 4 16]   # long groups; 16: 512 producers, 64 trainer ranks
    python scripts/bench/coordinator.py replay                    # 100,000 records, 10,000 of them groups
    [--producers N] [--trainers N] [--groups N] [--samples N] [--tokens N] [--steps N] [--n_behind N] [--json FILE]

Real: the coordinator, its ledger, the files of rollouts. A producer is a thread that leases, and hands the groups in at
once; a trainer rank is a thread that asks for work: so nothing but the coordinator takes time. Each run is a process of
its own. CPU time is that within calls, by caller, and that of the coordinator's own threads; making groups is not
counted. Calls come without Ray, which `hand_over.py` measures.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from simulated_run import Shape, Simulation, random_group

from coati_rl.checkpoint.ledger_files import START, read_ledger, segments_in
from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.checkpoint.ledger_groups import group_from_bytes, group_to_bytes
from coati_rl.checkpoint.ledger_resume import FINISHED, LEASED
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.types import Prompt

NUM_RECORDS = 100_000
QUICKSTART = {"producers": 2, "trainers": 2, "groups": 32, "samples": 8, "tokens": 32, "steps": 40, "n_behind": 0}
LONG = {
    "producers": 32,
    "trainers": 4,
    "groups": 2,
    "samples": 8,
    "tokens": 8192,
    "steps": 6,
    "n_behind": 1,
}  # at scale 1


def measure(shape: Shape) -> dict[str, float]:
    """Return the figures of one run, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, shape).result()


def _run(shape: Shape) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="coati-coordinator-") as directory:
        return Simulation(shape, Path(directory)).run()


def ledger(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians of runs with a ledger and without, in turns."""
    found: dict[str, list[dict[str, float]]] = {"with a ledger": [], "without": []}
    for _ in range(rounds):
        for (_, runs), has_ledger in zip(found.items(), (True, False), strict=True):
            runs.append(measure(replace(shape, has_ledger=has_ledger)))
    return {way: {name: median(each[name] for each in runs) for name in runs[0]} for way, runs in found.items()}


def scale(shape: Shape, scales: list[int]) -> dict[str, dict[str, float]]:
    """Return the figures of runs with as many times the producers and trainer ranks."""
    found = {}
    for times in scales:
        producers, trainers = shape.producers * times, shape.trainers * times
        figures = measure(replace(shape, producers=producers, trainers=trainers))
        found[f"{times}x"] = {"producers": producers, "trainers": trainers, **figures}
    return found


def replay(shape: Shape) -> dict[str, dict[str, float]]:
    """Return the time to read 100,000 records: leases, and for each tenth a group."""
    prompt = Prompt(uid="train-0.0", token_ids=tuple(range(40)), ground_truth="4")
    rng = np.random.default_rng(0)
    bodies = [group_to_bytes(random_group(prompt, shape, rng)) for _ in range(1000)]
    with tempfile.TemporaryDirectory(prefix="coati-coordinator-") as directory:
        writer = LedgerWriter(Path(directory))
        writer.begin([Record(kind=START, fields={"step": 0}).to_bytes], is_start=True)
        for number in range(1, NUM_RECORDS):
            kind, content = (FINISHED, bodies[number // 10 % len(bodies)]) if number % 10 == 0 else (LEASED, b"")
            fields = {"uid": f"train-{number}.0", "lease": number, "number": number, "producer": 0, "sync": 0}
            writer.append(Record(kind=kind, fields=fields, body=content).to_bytes)
        writer.flush(timeout_s=600)
        began, began_cpu = time.perf_counter(), time.process_time()
        groups = [
            group_from_bytes(each.body, lease_id=0, prompt_of=lambda uid: prompt) if each.kind == FINISHED else None
            for each in read_ledger(Path(directory))
        ]
        found = {"seconds": time.perf_counter() - began, "CPU s": time.process_time() - began_cpu}
        size = sum(each.path.stat().st_size for each in segments_in(Path(directory))) / 1e6
    return {"replay": {"records": len(groups), "groups": len(groups) - groups.count(None), "MB": size, **found}}


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ledger", "scale", "replay"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--detail", choices=("full", "text"), default="full", help="--rollout-detail")
    parser.add_argument("--json", type=Path)
    for name in QUICKSTART:
        parser.add_argument(f"--{name}", type=int)
    given = vars(parser.parse_args())
    sizes = LONG if given["what"] == "scale" else QUICKSTART
    chosen: dict[str, Any] = {name: sizes[name] if given[name] is None else given[name] for name in sizes}
    shape = Shape(**chosen, detail=given["detail"])
    found = {
        "ledger": lambda: ledger(shape, given["rounds"]),
        "scale": lambda: scale(shape, given["scales"]),
        "replay": lambda: replay(shape),
    }[given["what"]]()
    names = [*next(iter(found.values()))]
    print(asdict(shape))
    print("| |", " | ".join(found), "|")
    for name in names:
        print(f"| {name} |", " | ".join(f"{each[name]:.4g}" for each in found.values()), "|")
    if given["json"]:
        given["json"].write_text(json.dumps({"shape": asdict(shape), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
