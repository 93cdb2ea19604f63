"""Measure the cost of an in-flight weight commit besides loading the weights, and generation speed while staging.

    python scripts/bench/pause.py [--commits 20] [--running 1 4 16] [--tensor-parallel-size 1] [--json FILE]

In: a tiny model, whose weights load in almost no time, on vLLM's CPU build; a constant number of running requests; a
sender in the same process. Out: medians over the commits, in milliseconds of wall-clock time and, without tensor
parallelism, of the engine thread's CPU time, which is more reliable on a busy machine. Measured at the output of vLLM's
core:

    pause       from the last token before a commit to the first one after it
    step        between two other steps, median
    load        the call that loads and re-packs the staged weights
    overhead    pause - step - load: the call to the engine thread, pausing, clearing the caches, resuming, and the
                additional time of the first step, which recomputes running requests' keys and values
    recompute   a first step of as many new requests of the mean running length, minus a usual step; without a commit
    fixed cost  overhead - recompute

Staging is slowed down to half a second, and its tokens per second are compared with those of the half second before it.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from length_model import make_model, make_tokenizer

from coati_rl.transport.manifest import build_manifest
from coati_rl.transport.wire import WeightSender
from coati_rl.types import GenerationRequest, GenerationResult, SamplingParams
from producer.engines import EngineOptions, create_engine, engine_environment

MAX_MODEL_LEN = 512
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 240
STAGING_S, WARM_UP_S, TIMEOUT_S = 0.5, 2.0, 60.0
NUM_PREFILLS = 5
SHARES = ("pause", "step", "load", "overhead", "until the engine begins", "pausing and resuming", "first step's excess")


Instant = tuple[float, float]  # seconds of wall-clock time, and of CPU time of the engine thread


def now() -> Instant:
    """Return the current instant; to be called on the engine thread."""
    return time.perf_counter(), time.thread_time()


@dataclass
class Clock:
    """Record when tokens were sampled, and when commits began, loaded and ended; on the engine thread."""

    tokens: list[tuple[Instant, int]] = field(default_factory=list)  # (when, how many)
    commits: list[tuple[Instant, Instant]] = field(default_factory=list)
    loads: list[tuple[Instant, Instant]] = field(default_factory=list)
    steps: list[tuple[Instant, Instant]] = field(default_factory=list)  # those that made tokens

    def watch(self, core: Any) -> None:
        """Wrap the methods of a loaded engine's core, to read the clock when they return."""
        client, rpc, commit = core._engine.engine_core, core._engine.collective_rpc, core.commit
        get_output = client.get_output

        def timed_output() -> Any:
            begin = now()
            outputs = get_output()
            if number := sum(len(output.new_token_ids) for output in outputs.outputs):
                self.tokens.append((now(), number))
                self.steps.append((begin, now()))
            return outputs

        def timed_rpc(method: str, *args: Any, **options: Any) -> Any:
            begin = now()
            answer = rpc(method, *args, **options)
            if method == "coati_commit":
                self.loads.append((begin, now()))
            return answer

        def timed_commit(policy_version: int) -> Any:
            begin = now()
            results = commit(policy_version)
            self.commits.append((begin, now()))
            return results

        client.get_output, core._engine.collective_rpc, core.commit = timed_output, timed_rpc, timed_commit

    def forget(self) -> None:
        """Clear all records."""
        for times in (self.tokens, self.commits, self.loads, self.steps):
            times.clear()

    def rate(self, begin: float, end: float) -> float:
        """Return the tokens per second in an interval."""
        return sum(number for (when, _), number in self.tokens if begin < when <= end) / (end - begin)

    def shares(self, kind: int) -> dict[str, list[float]]:
        """Return the milliseconds of each commit by name; `kind` is the index into an Instant."""
        times = [when for when, _ in self.tokens]
        gaps = [
            later[kind] - when[kind]
            for when, later in pairwise(times)
            if not any(when < begin < later for begin, _ in self.commits)
        ]
        step = median(gaps)
        rows: dict[str, list[float]] = {name: [] for name in SHARES}
        for (begin, end), (load_begin, load_end) in zip(self.commits, self.loads, strict=True):
            last, first = max(when for when in times if when < begin), min(when for when in times if when > end)
            pause, load = first[kind] - last[kind], load_end[kind] - load_begin[kind]
            before, inside, after = begin[kind] - last[kind], end[kind] - begin[kind], first[kind] - end[kind]
            for name, value in zip(
                SHARES, (pause, step, load, pause - step - load, before, inside - load, after - step), strict=True
            ):
                rows[name].append(1e3 * value)
        return rows


class Traffic:
    """Keep a number of requests running, from a separate thread."""

    def __init__(self, engine: Any, *, running: int) -> None:
        self._engine = engine
        self._stopped = threading.Event()
        self._submitted = 0
        self._running = running
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until all submitted requests have finished."""
        self._stopped.set()
        self._thread.join(timeout=TIMEOUT_S)

    def _run(self) -> None:
        generating: set[Future[GenerationResult]] = set()
        while not self._stopped.is_set() or generating:
            while not self._stopped.is_set() and len(generating) < self._running:
                generating.add(self._submit())
            done, generating = wait(generating, timeout=0.05, return_when=FIRST_COMPLETED)
            for future in done:
                if (error := future.result().error) is not None:
                    raise RuntimeError(error)

    def _submit(self) -> Future[GenerationResult]:
        self._submitted += 1
        length = (
            RESPONSE_TOKENS if self._submitted > self._running else RESPONSE_TOKENS * self._submitted // self._running
        )
        future: Future[GenerationResult] = self._engine.submit(
            GenerationRequest(
                request_id=str(self._submitted),
                token_ids=tuple((7 * self._submitted + place) % 250 for place in range(PROMPT_TOKENS)),
                num_samples=1,
                sampling=SamplingParams(
                    max_new_tokens=length, seed=self._submitted
                ),  # so that the first ones do not end together
            )
        )
        return future


def slowly(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, spread over about STAGING_S."""
    for pair in weights:
        time.sleep(STAGING_S / len(weights))
        yield pair


def measure(
    engine: Any, clock: Clock, weights: list[tuple[str, torch.Tensor]], *, commits: int, ranks: int
) -> list[float]:
    """Stage and commit under load. Returns: the ratio of tokens/s during each staging to those just before."""
    sender, ratios = WeightSender(), []
    (invitation,) = sender.open([ranks])
    with ThreadPoolExecutor(max_workers=1) as pool:
        for _ in range(commits):
            version = engine.policy_version + 1
            before = time.perf_counter()
            time.sleep(STAGING_S)
            begin = time.perf_counter()
            manifest = build_manifest(weights, policy_version=version)
            sent = pool.submit(sender.send, manifest, slowly(weights), timeout_s=TIMEOUT_S)
            engine.stage_weights(manifest, invitation, timeout_s=TIMEOUT_S)
            sent.result(timeout=TIMEOUT_S)
            if rate_before := clock.rate(before, begin):  # otherwise other load blocked the engine for this time
                ratios.append(clock.rate(begin, time.perf_counter()) / rate_before)
            engine.commit_weights(version, in_flight=True, timeout_s=TIMEOUT_S)
        time.sleep(STAGING_S)  # until tokens follow the last commit
    sender.close()
    return ratios


def prefill_time(engine: Any, clock: Clock, *, running: int) -> Instant:
    """Return the time of the first step of new requests that have the mean length of running ones."""
    clock.forget()
    together = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        held = pool.submit(engine._call, lambda: together.wait(TIMEOUT_S), until=time.monotonic() + TIMEOUT_S)
        requests = [
            GenerationRequest(
                request_id=f"prefill {index}",
                token_ids=tuple(torch.randint(0, 250, (PROMPT_TOKENS + RESPONSE_TOKENS // 2,)).tolist()),
                num_samples=1,
                sampling=SamplingParams(max_new_tokens=2, seed=index),
            )
            for index in range(running)
        ]
        futures = [engine.submit(request) for request in requests]
        together.set()
        held.result(timeout=TIMEOUT_S)
    wait(futures, timeout=TIMEOUT_S)
    begin, end = clock.steps[0]
    return end[0] - begin[0], end[1] - begin[1]


def run(directory: str, *, commits: int, numbers: list[int], ranks: int) -> dict[str, Any]:
    """Measure all figures, by number of running requests."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, end_probability=0.0, seed=0)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    options = EngineOptions(
        model=directory, max_model_len=MAX_MODEL_LEN, max_num_seqs=max(numbers), tensor_parallel_size=ranks
    )
    engine: Any = create_engine("vllm", options)
    clock, figures = Clock(), {}
    clock.watch(engine._core)
    weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
    try:
        for number in numbers:
            clock.forget()
            traffic = Traffic(engine, running=number)
            time.sleep(WARM_UP_S)
            ratios = measure(engine, clock, weights, commits=commits, ranks=ranks)
            traffic.stop()
            clock_ms, cpu_ms = clock.shares(0), clock.shares(1)
            prefills = [prefill_time(engine, clock, running=number) for _ in range(NUM_PREFILLS)]
            for kind, rows in enumerate((clock_ms, cpu_ms)):
                step = median(rows["step"])
                rows["recompute"] = [1e3 * took[kind] - step for took in prefills]
                rows["fixed cost"] = [overhead - median(rows["recompute"]) for overhead in rows["overhead"]]
            figures[str(number)] = {
                "clock_ms": clock_ms,
                "cpu_ms": cpu_ms if ranks == 1 else None,
                "staging_rate": ratios,
                "load_average": os.getloadavg()[0],
            }
    finally:
        engine.close()
    return figures


def show(figures: dict[str, Any]) -> None:
    """Format one column per number of running requests and kind of time."""
    kinds = [(number, kind) for number, found in figures.items() for kind in ("clock_ms", "cpu_ms") if found[kind]]
    print(f"{'running requests':<26}" + "".join(f"{number:>12}" for number, _ in kinds))
    print(f"{'median, ms':<26}" + "".join(f"{kind.removesuffix('_ms'):>12}" for _, kind in kinds))
    for name in (*SHARES, "recompute", "fixed cost"):
        print(f"{name:<26}" + "".join(f"{median(figures[number][kind][name]):12.1f}" for number, kind in kinds))
    for number, found in figures.items():
        rate = median(found["staging_rate"])
        print(
            f"{number} running: tokens/s while staging {rate:.2f} of before; load average {found['load_average']:.1f}"
        )


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 16], help="numbers of requests")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ.update(engine_environment("cpu", arguments.tensor_parallel_size))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        figures = run(
            directory, commits=arguments.commits, numbers=arguments.running, ranks=arguments.tensor_parallel_size
        )
    show(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
