"""Simulate the producers and trainer ranks of a run against a real coordinator with its ledger and files."""

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
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
        self._answers = [PackedGroup.pack(random_group(prompts[0], shape, rng)) for _ in range(32)]
        self._version = 0
        self._is_over = False
        self._lock = threading.Lock()
        self.cpu_s: defaultdict[str, float] = defaultdict(float)  # within calls, by caller
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
        ledger_s = sum(
            time.clock_gettime(time.pthread_getcpuclockid(each.ident or 0))
            for each in threading.enumerate()
            if each.name == "ledger"
        )
        segments = segments_in(self._directory / "ledger")
        return {
            "groups/s": groups / seconds,
            "groups/s of a CPU": groups / cpu_s,
            "CPU ms a step": 1000 * cpu_s / shape.steps,
            "CPU ms a group": 1000 * cpu_s / groups,
            "of it calls of producers": 1000 * self.cpu_s["producer"] / groups,
            "of it calls of trainers": 1000 * self.cpu_s["trainer"] / groups,
            "of it calls of the driver": 1000 * self.cpu_s["driver"] / groups,
            "of it the ledger's thread": 1000 * ledger_s / groups,
            "of it other threads": 1000 * (own_threads - ledger_s) / groups,
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
        return replace(
            answer,
            lease_id=lease.lease_id,
            producer_id=producer,
            token_ids=answer.token_ids.copy(),
            logprobs=answer.logprobs.copy(),
            policy_versions=((self._version, len(answer.logprobs)),),
        )

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


def random_group(prompt: Prompt, shape: Shape, rng: np.random.Generator) -> RolloutGroup:
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
