"""Measure the coordinator with its ledger and files against simulated producers and trainers.

    python scripts/bench/coordinator.py ledger [--rounds 5]       # a step of the quickstart's size, with it and without
    python scripts/bench/coordinator.py scale [--scales 1 4 16]   # long groups; 16: 512 producers, 64 trainer ranks
    [--producers N] [--trainers N] [--groups N] [--samples N] [--tokens N] [--steps N] [--n_behind N] [--json FILE]

Real: the coordinator, its ledger, the files of rollouts. A producer is a thread that leases, and hands the groups in at
once; a trainer rank is a thread that asks for work: so nothing but the coordinator takes time. Each run is a process of
its own. CPU time is that within calls, by caller, and that of the coordinator's own threads; making groups is not
counted. Calls come without Ray, which `hand_over.py` measures.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.checkpoint.ledger_files import segments_in
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.config.cli import build_config
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.types import Completion, Lease, Prompt, RolloutDetail, RolloutGroup, Score
from coati_rl.work import CommitReport, FinishWork, SyncReport, SyncWork, TrainWork, Wait
from producer.environments.single_turn import single_turns

POLL_S = 5.0  # for which a call waits, as those of a run
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Describe a run."""

    producers: int
    trainers: int
    groups: int  # of a producer, in a step
    samples: int
    tokens: int  # of a response, at most; at least half as many
    steps: int
    n_behind: int
    detail: RolloutDetail  # of the rollouts' files
    has_ledger: bool = True


class Simulation:
    """Run producers and trainers against a coordinator to the end."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self._shape, self._directory = shape, directory
        per_rank = shape.groups * shape.producers // shape.trainers
        config = build_config(
            {
                **{"model": "none", "dataset": "none", "num_generations": shape.samples, "max_steps": shape.steps},
                **{"num_trainers": shape.trainers, "num_inferencer": shape.producers, "n_behind": shape.n_behind},
                **{"inference_batch_size": shape.groups, "inference_microbatch_size": shape.groups},
                **{"train_batch_size": per_rank, "train_minibatch_size": per_rank, "max_new_tokens": shape.tokens},
            }
        )
        settings = coordinator_settings(config)
        prompts = [Prompt(uid=f"train-{i}", token_ids=tuple(range(40)), ground_truth="4") for i in range(512)]
        writer = LedgerWriter(directory / "ledger") if shape.has_ledger else None
        self._coordinator = Coordinator(
            settings,
            DatasetPrompts(prompts, num_episodes=1_000_000, seed=0),
            EvaluationRounds({}, directory / "eval", plan=settings.sampling_plans["eval"]),
            RolloutRecorder(directory / "rollouts", shape.detail),
            ledger=writer,
        )
        rng = np.random.default_rng(0)
        self._answers = [PackedGroup.pack(_group(prompts[0], shape, rng)) for _ in range(32)]
        self._version = 0
        self._is_over = False
        self._lock = threading.Lock()
        self.cpu_s: Counter[str] = Counter()  # within calls, by caller
        self.of_threads_s = 0.0  # CPU time of all simulated threads, calls included

    def run(self) -> dict[str, float]:
        """Return the figures of the run."""
        shape = self._shape
        began_cpu, began = time.process_time(), time.perf_counter()
        threads = [
            *(threading.Thread(target=self._counted, args=(self._produce, i)) for i in range(shape.producers)),
            *(threading.Thread(target=self._counted, args=(self._train, i)) for i in range(shape.trainers)),
            threading.Thread(target=self._counted, args=(self._drive, 0)),
        ]
        for producer in range(shape.producers):
            self._coordinator.add_producer(producer)
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self._coordinator.flush(timeout_s=600)
        seconds = time.perf_counter() - began
        own_threads = time.process_time() - began_cpu - self.of_threads_s
        groups = shape.steps * shape.groups * shape.producers
        cpu_s = sum(self.cpu_s.values()) + own_threads
        segments = segments_in(self._directory / "ledger")
        return {
            "groups/s": groups / seconds,
            "groups/s of a CPU": groups / cpu_s,
            "CPU ms a step": 1000 * cpu_s / shape.steps,
            "CPU ms a group": 1000 * cpu_s / groups,
            "of it calls of producers": 1000 * self.cpu_s["producer"] / groups,
            "of it calls of trainers": 1000 * self.cpu_s["trainer"] / groups,
            "of it calls of the driver": 1000 * self.cpu_s["driver"] / groups,
            "of it ledger and files": 1000 * own_threads / groups,
            "bytes of the ledger a group": sum(each.path.stat().st_size for each in segments) / groups,
            "peak memory, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }

    def _counted(self, run: Callable[..., None], argument: Any) -> None:
        run(argument)
        with self._lock:
            self.of_threads_s += time.thread_time()

    def _call(self, who: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            spent = time.thread_time() - began
            with self._lock:
                self.cpu_s[who] += spent

    def _produce(self, number: int) -> None:
        while not self._is_over:
            reply = self._call(
                "producer",
                self._coordinator.lease,
                number,
                max_prompts=self._shape.groups,
                timeout_s=POLL_S,
                is_drained=True,
            )
            if reply.is_finished:
                return
            for lease in reply.leases:
                self._call("producer", self._coordinator.put, number, [self._answer(lease, number)])

    def _answer(self, lease: Lease, producer: int) -> PackedGroup:
        """Return a group with arrays of its own, so that memory is that of a run."""
        answer = self._answers[lease.lease_id % len(self._answers)]
        arrays = {"token_ids": answer.token_ids.copy(), "logprobs": answer.logprobs.copy()}
        versions = ((self._version, len(answer.logprobs)),)
        return replace(answer, lease_id=lease.lease_id, producer_id=producer, policy_versions=versions, **arrays)

    def _train(self, rank: int) -> None:
        number = 0
        while True:
            item = self._call("trainer", self._coordinator.next_work, number, rank=rank, timeout_s=POLL_S)
            if isinstance(item, Wait):
                continue
            number += 1
            if rank == 0:
                self._report(item)
            if isinstance(item, FinishWork):
                self._is_over = True
                return

    def _drive(self, number: int) -> None:
        """Take events, as the driver does: what is not taken stays in the coordinator's state."""
        while not self._is_over:
            number += len(self._call("driver", self._coordinator.events, number, timeout_s=0.5))

    def _report(self, item: Any) -> None:
        if isinstance(item, TrainWork) and item.batch.is_last:
            self._call("trainer", self._coordinator.report_step, item.batch.step, {})
        if isinstance(item, SyncWork):
            self._version = item.policy_version
            report = SyncReport(index=item.index, staged=item.members, failed={}, seconds=0.0, digest="d", identity="i")
            self._call("trainer", self._coordinator.report_sync, report)
            for producer in item.members:  # each in a thread, as a trainer's
                commit = CommitReport(producer=producer, policy_version=item.policy_version)
                threading.Thread(target=self._counted, args=(self._commit, commit)).start()

    def _commit(self, commit: CommitReport) -> None:
        self._call("trainer", self._coordinator.report_commit, commit)


def _group(prompt: Prompt, shape: Shape, rng: np.random.Generator) -> RolloutGroup:
    """Return random answers: skewed token ids, two letters a token."""
    lengths = rng.integers(shape.tokens // 2, shape.tokens + 1, size=shape.samples)
    completions = [
        Completion(
            token_ids=rng.zipf(1.3, size=length).clip(max=511).astype(np.int32),
            logprobs=-rng.exponential(0.5, size=length).astype(np.float32),
            policy_versions=np.zeros(length, dtype=np.int32),
            finish_reason="stop",
            text="".join(map(chr, rng.integers(97, 123, size=2 * length))),
        )
        for length in lengths
    ]
    scores = [
        Score(reward=i % 2, answer_correct=i % 2 > 0, format_valid=True, verdict="ok") for i in range(len(lengths))
    ]
    return RolloutGroup(
        lease_id=0,
        producer_id=0,
        prompt=prompt,
        temperature=1.0,
        trajectories=single_turns(prompt, completions, temperature=1.0),
        scores=tuple(scores),
    )


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
        sizes = {"producers": shape.producers * times, "trainers": shape.trainers * times}
        found[f"{times}x"] = {**sizes, **measure(replace(shape, **sizes))}
    return found


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ledger", "scale"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--detail", choices=("full", "text"), default="full", help="--rollout-detail")
    parser.add_argument("--json", type=Path)
    for name in QUICKSTART:
        parser.add_argument(f"--{name}", type=int)
    given = vars(parser.parse_args())
    sizes = QUICKSTART if given["what"] == "ledger" else LONG
    shape = Shape(
        **{name: sizes[name] if given[name] is None else given[name] for name in sizes}, detail=given["detail"]
    )
    found = ledger(shape, given["rounds"]) if given["what"] == "ledger" else scale(shape, given["scales"])
    names = [*next(iter(found.values()))]
    print(asdict(shape))
    print("| |", " | ".join(found), "|")
    for name in names:
        print(f"| {name} |", " | ".join(f"{each[name]:.4g}" for each in found.values()), "|")
    if given["json"]:
        given["json"].write_text(json.dumps({"shape": asdict(shape), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
