"""Measure what it costs to hand rollout groups in and their batch out: the coordinator against plain `ray.put` and
`ray.get`.

    python scripts/bench/hand_over.py [--batch 8] [--tokens 512] [--batches 40] [--rounds 5] [--json FILE]

Ours: a producer's `put` of a batch of groups to the coordinator actor, and a trainer's `next_work`, for which the
coordinator filters, forms advantages and plans the mini-batch, and which the trainer lays out; and, apart from that,
`put` alone. Plain: `ray.put` and `ray.get` of each group. One process calls, as a producer or trainer does; both sides
have the same groups, made anew for each batch. The ways take turns; milliseconds per group, medians over a round's
batches, then over rounds. Besides, the bytes of what `put` and `next_work` send.
"""

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from coati_rl.processes.ray_environment import actor_environment

os.environ.update(actor_environment())  # as a run's; before anything imports Ray

import ray

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.batching.packing import build_mini_batch
from coati_rl.config.cli import build_config
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.runtime.remote import RemoteCoordinator
from coati_rl.types import Completion, Lease, Prompt, RolloutGroup, SamplingParams, Score
from coati_rl.work import TrainWork
from producer.environments.single_turn import single_turns

TIMEOUT_S = 60.0
HANDED_OUT = "next_work sends"


def make_group(lease: Lease, *, num_tokens: int, rng: np.random.Generator) -> RolloutGroup:
    """Return what a producer hands in: `num_tokens` a response, half of the responses right."""
    completions = [
        Completion(
            token_ids=rng.integers(0, 1000, num_tokens, dtype=np.int32),
            logprobs=-rng.random(num_tokens, dtype=np.float32),
            policy_versions=np.zeros(num_tokens, dtype=np.int32),
            finish_reason="stop",
            text="x" * (3 * num_tokens),
        )
        for _ in range(lease.group_size)
    ]
    scores = tuple(
        Score(reward=float(i % 2), answer_correct=i % 2 == 1, format_valid=True, verdict="ok" if i % 2 else "wrong")
        for i in range(lease.group_size)
    )
    return RolloutGroup(
        lease_id=lease.lease_id,
        producer_id=0,
        prompt=lease.prompt,
        temperature=1.0,
        trajectories=single_turns(lease.prompt, completions, temperature=1.0),
        scores=scores,
    )


def make_coordinator(arguments: argparse.Namespace, directory: Path) -> RemoteCoordinator:
    """In an actor, with prompts and slots enough that it never waits for weights."""
    sizes: dict[str, Any] = {
        **{"num_trainers": 1, "num_inferencer": 1, "num_generations": arguments.group_size, "kl_coeff": 0.0},
        **{"inference_batch_size": arguments.batch * arguments.batches, "inference_microbatch_size": arguments.batch},
        **{"train_batch_size": arguments.batch, "train_minibatch_size": arguments.batch},
        **{"train_microbatch_size": 8, "max_new_tokens": arguments.tokens},
    }
    prompts = [
        Prompt(uid=f"train-{i}", token_ids=tuple(range(100)), ground_truth=str(i))
        for i in range(arguments.batch * arguments.batches)
    ]
    actor: Any = ray.remote(Coordinator).options(max_concurrency=4)
    handle = actor.remote(
        coordinator_settings(build_config(sizes)),
        DatasetPrompts(prompts, num_episodes=1, seed=0),
        EvaluationRounds({}, directory / "eval"),
        RolloutRecorder(directory / "rollouts"),
    )
    ray.get(handle.add_producer.remote(0, version=0), timeout=TIMEOUT_S)
    return RemoteCoordinator(handle)


def timed(function: Callable[[], Any], times: list[float]) -> Any:
    """Call it, and note how long it took."""
    begin = time.perf_counter()
    result = function()
    times.append(time.perf_counter() - begin)
    return result


def bytes_per_token(arguments: argparse.Namespace, rng: np.random.Generator) -> float:
    """Return the bytes that `put` sends for a sampled token, beside its text."""
    prompt = Prompt(uid="train-0", token_ids=tuple(range(100)), ground_truth="0")
    lease = Lease(lease_id=0, prompt=prompt, group_size=arguments.group_size, sampling=SamplingParams())
    group = make_group(lease, num_tokens=arguments.tokens, rng=rng)
    num_text = sum(len(each.text) for each in group.trajectories)
    num_bytes = len(pickle.dumps(PackedGroup.pack(group), protocol=5)) - num_text
    return num_bytes / (arguments.group_size * arguments.tokens)


def run_round(arguments: argparse.Namespace, directory: Path, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds per group, by way, and what `next_work` sends for a sampled token."""
    coordinator = make_coordinator(arguments, directory)
    put: list[float] = []
    both: list[float] = []
    plain: list[float] = []
    handed_out: list[int] = []  # bytes
    for index in range(arguments.batches):
        leases = coordinator.lease(0, max_prompts=arguments.batch, timeout_s=TIMEOUT_S, is_drained=True).leases
        groups = [make_group(lease, num_tokens=arguments.tokens, rng=rng) for lease in leases]

        def hand_over(groups: list[RolloutGroup] = groups, index: int = index) -> None:
            timed(lambda: coordinator.put(0, [PackedGroup.pack(group) for group in groups]), put)
            work = coordinator.next_work(index, rank=0, timeout_s=TIMEOUT_S)
            if not isinstance(work, TrainWork):
                raise SystemExit(f"the coordinator handed out {work}")
            build_mini_batch(work.batch)
            handed_out.append(work.batch.samples.num_bytes)

        def by_ray(groups: list[RolloutGroup] = groups) -> None:
            for group in groups:
                ray.get(ray.put(group), timeout=TIMEOUT_S)

        ways = [lambda: timed(hand_over, both), lambda: timed(by_ray, plain)]
        for way in ways if index % 2 else reversed(ways):
            way()
    warm = slice(2, None)
    ways_ms = {"plain ray.put + ray.get": plain, "put": put, "put and next_work": both}
    figures = {name: 1000 * median(times[warm]) / arguments.batch for name, times in ways_ms.items()}
    num_tokens = arguments.batch * arguments.group_size * arguments.tokens
    return figures | {HANDED_OUT: median(handed_out) / num_tokens}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="groups at a time")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each response")
    parser.add_argument("--batches", type=int, default=40, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        rounds = []
        for _ in range(arguments.rounds):
            with TemporaryDirectory() as directory:
                rounds.append(run_round(arguments, Path(directory), rng))
    finally:
        ray.shutdown()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {arguments.batch} groups of {arguments.group_size}")
    medians = {name: median(r[name] for r in rounds) for name in rounds[0]}
    handed_out = medians.pop(HANDED_OUT)
    plain = medians["plain ray.put + ray.get"]
    for name, milliseconds in medians.items():
        print(f"{name:<28}{milliseconds:8.3f} ms per group{milliseconds / plain:8.2f}x")
    sent = bytes_per_token(arguments, rng)
    print(f"{'put sends':<28}{sent:8.2f} bytes per sampled token, beside its text")
    print(f"{HANDED_OUT:<28}{handed_out:8.2f} bytes per sampled token")
    if arguments.json:
        sizes = {"put_bytes_per_token": sent, "next_work_bytes_per_token": handed_out}
        figures = {"rounds": rounds, "medians": medians, **sizes}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
