"""Measure what the ledger costs a step of the quickstart's size, with it and without it in turn, and its replay.

    python scripts/bench/ledger.py [--steps 40] [--rounds 5] [--samples 8] [--tokens 32] [--groups 64]

A real coordinator gets the groups of each step from one thread, which leases, delivers and trains them; there is no
engine and no trainer. Printed are the CPU milliseconds of a step with and without a ledger (of all threads, so that
other programs on the machine count for little), those of the calling thread alone, the time for which steps waited for
the disk, and the bytes of a step. Then 100,000 records are written and read.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from coati_rl.checkpoint.ledger_files import read_ledger, segments_in
from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.config.cli import build_config
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.run_state import RunStart
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.data.packed_group import PackedGroup
from coati_rl.data.prompt_source import DatasetPrompts
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.types import Completion, Lease, Prompt, RolloutGroup, Score
from coati_rl.work import CommitReport, FinishWork, SyncReport, SyncWork, TrainWork, Wait
from producer.environments.single_turn import single_turns


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 40, "rounds": 5, "samples": 8, "tokens": 32, "groups": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="coati-ledger-") as scratch:
        run(args, Path(scratch) / "warm", has_ledger=True)
        for number in range(args.rounds):
            for has_ledger in (True, False):
                found[has_ledger].append(run(args, Path(scratch) / f"{number}-{has_ledger}", has_ledger=has_ledger))
        for name in found[True][0]:
            values = [statistics.median(each[name] for each in found[is_on]) for is_on in (True, False)]
            print(f"{name}: {values[0]:.2f} with a ledger, {values[1]:.2f} without")
        replay(Path(scratch) / "replay")


def run(args: argparse.Namespace, directory: Path, *, has_ledger: bool) -> dict[str, float]:
    """Return the figures of a step of one run."""
    config = build_config(
        {
            "model": "none",
            "dataset": "none",
            "num_trainers": 1,
            "num_inferencer": 1,
            "num_generations": args.samples,
            "inference_batch_size": args.groups,
            "inference_microbatch_size": args.groups,
            "train_batch_size": args.groups,
            "train_minibatch_size": args.groups,
            "max_steps": args.steps,
        }
    )
    settings = coordinator_settings(config)
    prompts = [Prompt(uid=f"train-{i}", token_ids=tuple(range(40)), ground_truth="4") for i in range(512)]
    evaluation = EvaluationRounds({}, directory / "eval", plan=settings.sampling_plans["eval"])
    writer = LedgerWriter(directory / "ledger") if has_ledger else None
    coordinator = Coordinator(
        settings,
        DatasetPrompts(prompts, num_episodes=args.steps, seed=0),
        evaluation,
        RolloutRecorder(directory / "rollouts"),
        RunStart(),
        writer,
    )
    coordinator.add_producer(0)
    rng, waited = np.random.default_rng(0), 0.0
    began, began_here = time.process_time(), time.thread_time()
    making = 0.0
    version, number = 0, 0
    while True:
        leases = coordinator.lease(0, max_prompts=10_000, timeout_s=0).leases
        made_at = time.thread_time()
        groups = [group_of(lease, rng, version, args.tokens) for lease in leases]
        making += time.thread_time() - made_at
        for group in groups:
            coordinator.put(0, [group])
        asked_at, asked_cpu = time.perf_counter(), time.thread_time()
        item = coordinator.next_work(number, rank=0, timeout_s=1.0)
        if isinstance(item, TrainWork):
            waited += time.perf_counter() - asked_at - (time.thread_time() - asked_cpu)
        if isinstance(item, Wait):
            continue
        number += 1
        if isinstance(item, TrainWork) and item.batch.is_last:
            coordinator.report_step(item.batch.step, {})
        if isinstance(item, SyncWork):
            version = item.policy_version
            report = SyncReport(index=item.index, staged=item.members, failed={}, seconds=0.0, digest="d", identity="i")
            coordinator.report_sync(report)
            coordinator.report_commit(CommitReport(producer=0, policy_version=version))
        if isinstance(item, FinishWork):
            break
    coordinator.flush(timeout_s=60)
    steps = args.steps
    return {
        "CPU ms a step, all threads": (time.process_time() - began - making) * 1000 / steps,
        "CPU ms a step, calling thread": (time.thread_time() - began_here - making) * 1000 / steps,
        "ms a step off the CPU before a batch is handed out": waited * 1000 / steps,
        "bytes of the ledger a step": written(directory / "ledger") / steps,
    }


def group_of(lease: Lease, rng: np.random.Generator, version: int, num_tokens: int) -> PackedGroup:
    """Return a group of random answers."""
    lengths = rng.integers(num_tokens // 2, num_tokens + 1, size=lease.group_size)
    completions = [
        Completion(
            token_ids=rng.zipf(1.3, size=length).clip(max=511).astype(np.int32),
            logprobs=-rng.exponential(0.5, size=length).astype(np.float32),
            policy_versions=np.full(length, version, dtype=np.int32),
            finish_reason="stop",
            text="".join(map(chr, rng.integers(97, 123, size=2 * length))),
        )
        for length in lengths
    ]
    group = RolloutGroup(
        lease_id=lease.lease_id,
        producer_id=0,
        prompt=lease.prompt,
        temperature=1.0,
        trajectories=single_turns(lease.prompt, completions, temperature=1.0),
        scores=tuple(
            Score(reward=float(i % 2), answer_correct=i % 2 > 0, format_valid=True, verdict="ok")
            for i in range(lease.group_size)
        ),
    )
    return PackedGroup.pack(group)


def written(ledger: Path) -> int:
    """Return the bytes of all segments: no checkpoint is reported as complete, which would delete some."""
    return sum(each.path.stat().st_size for each in segments_in(ledger))


def replay(directory: Path) -> None:
    """Print the time of 100,000 records, a tenth of them groups of 1,000 bytes."""
    writer, rng = LedgerWriter(directory), np.random.default_rng(0)
    writer.begin([Record(kind="start", fields={"step": 0}).to_bytes], is_start=True)
    for number in range(100_000):
        body = rng.bytes(1000) if number % 10 == 0 else b""
        fields = {"uid": f"train-{number}.0", "lease": number, "number": number, "sync": 0}
        writer.append(Record(kind="leased", fields=fields, body=body).to_bytes)
    writer.flush(timeout_s=60)
    began = time.process_time()
    count = sum(1 for _ in read_ledger(directory))
    print(
        f"{count - 1} records of {written(directory) / 1e6:.1f} MB read in {time.process_time() - began:.2f} s of CPU"
    )


if __name__ == "__main__":
    main()
