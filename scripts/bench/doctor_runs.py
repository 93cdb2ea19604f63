"""Make run directories of tiny runs for `doctor_matrix.py`, with the driver's own records.

Real: configuration, preparation, coordinator, producers with transformers' engine, trainers, weight syncs, rewards, and
the files, which the functions of the driver write. Replaced: processes by threads, as in tests/unit/loops, whose
`ThreadedRun` this is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from coati_rl.driver import launch
from coati_rl.driver.event_recorder import EventRecorder
from coati_rl.driver.loading import LoadingLines
from coati_rl.errors import RunError
from coati_rl.observability.progress import ProgressDisplay
from coati_rl.observability.sampled_answer import AnswerReader
from coati_rl.observability.timeline import Timeline
from coati_rl.processes.run_dir import locked
from coati_rl.types import GenerationRequest, GenerationResult
from tests.unit.loops import harness, offline_run

Show = Callable[[dict[str, Any]], None]
harness.RUN_TIMEOUT_S = 200.0  # of long runs on a busy machine


class FaultyEngine:
    """Pass requests on to an engine, changed from outside.

    Args:
        engine: the real one.
        heats: factor of the temperature that it samples at.
        sleeps_s: before each result.
        refuses: one of so many requests gets an error; 0: none.
        noise: relative, on the weights after each commit.
        is_stale: later commits leave the weights of the first one.
    """

    def __init__(
        self,
        engine: Any,
        *,
        heats: float = 1.0,
        sleeps_s: float = 0.0,
        refuses: int = 0,
        noise: float = 0.0,
        is_stale: bool = False,
    ) -> None:
        self._engine, self._heats, self._sleeps_s, self._refuses, self._noise = engine, heats, sleeps_s, refuses, noise
        self._is_stale = is_stale
        self._first: list[torch.Tensor] = []  # weights of the first commit
        self._num_requests = 0
        self._distort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest, on_tokens: Any = None) -> Any:
        """See `GenerationEngine.submit`."""
        self._num_requests += 1
        sampling = replace(request.sampling, temperature=self._heats * request.sampling.temperature)
        future = self._engine.submit(replace(request, sampling=sampling), on_tokens)
        if self._sleeps_s:
            future.add_done_callback(lambda _: time.sleep(self._sleeps_s))  # in the engine's thread
        if self._refuses and self._num_requests % self._refuses == 0:
            seen: Any = type(future)()
            refusal = GenerationResult(request_id=request.request_id, error="the prompt has a token that is not known")
            future.add_done_callback(lambda _: seen.set_result(refusal))
            return seen
        return future

    def commit_weights(self, policy_version: int, **options: Any) -> Any:
        """See `GenerationEngine.commit_weights`."""
        identities = self._engine.commit_weights(policy_version, **options)
        self._distort()
        return identities

    def _distort(self) -> None:
        weights = [*self._engine._engine._transformers._parameters.values()]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for each in weights if self._noise else ():
                each.mul_(1 + self._noise * torch.randn(each.shape, generator=generator))
            for each, first in zip(weights, self._first, strict=False):
                each.copy_(first)
        if self._is_stale and not self._first:
            self._first = [each.clone() for each in weights]


class RecordedRun(harness.ThreadedRun):
    """A run in threads that writes what a driver writes."""

    def __init__(
        self, values: dict[str, Any], *, faults: dict[int | None, dict[str, Any]] | None = None, **options: Any
    ):
        """`faults`: arguments of `FaultyEngine` by the producer's number; None: of all."""
        self._faults = faults or {}
        super().__init__(values, **options)

    def run(self) -> Any:
        """Run to the end. Raises: RunError, whatever ended it."""
        trace = self.trace
        with _records(trace.prepared, trace.paths) as (display, note):
            self._display, self._note = display, note
            return super().run()

    def _show(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self._note(event)
        self._display.show_wait(self._coordinator.status().text)

    def _create_engine(self, backend: str, options: Any, **others: Any) -> Any:
        number = len(self.trace.engines)
        engine = super()._create_engine(backend, options, **others)
        faults = self._faults.get(None, self._faults.get(number))
        return FaultyEngine(engine, **faults) if faults else engine


def run_job(job: str, values: dict[str, Any]) -> None:
    """Run a job on a dataset; its records are written when it has ended."""
    trace = offline_run.run_offline(job, values)
    config = offline_run.build_job(values, offline_run.OFFLINE[job])

    prepared = SimpleNamespace(config=config, plan=SimpleNamespace(num_steps=None))
    paths = SimpleNamespace(run_dir=trace.run_dir, logs=trace.run_dir / "logs")
    with _records(prepared, paths) as (_, note):
        for event in trace.events:
            note(event)


@contextmanager
def _records(prepared: Any, paths: Any) -> Iterator[tuple[ProgressDisplay, Show]]:
    """Open what the driver writes; gives its display, and the function that records an event."""
    with ExitStack() as files:
        null = files.enter_context(Path("/dev/null").open("w"))
        log = files.enter_context(launch._driver_log(paths.logs / "driver.log"))
        sinks, syncs = files.enter_context(launch._records(prepared.config, paths.run_dir, first_step=0))
        files.enter_context(locked(paths.run_dir))
        timeline = files.enter_context(closing(Timeline(paths.run_dir / "timeline", "driver")))
        display = files.enter_context(ProgressDisplay(prepared.plan.num_steps, Console(file=null)))
        display.print_line(f"run directory {paths.run_dir}")
        recorder = EventRecorder(
            display=display,
            loading=LoadingLines(prepared.config),
            sinks=sinks,
            syncs=syncs,
            answers=AnswerReader(paths.run_dir / "rollouts", every=None, first_step=0),
            run_dir=paths.run_dir,
        )

        def note(event: dict[str, Any]) -> None:
            recorder.record(launch._with_timeline_event(event, timeline, log))

        yield display, note


def run_to_its_end(run: RecordedRun) -> None:
    """Run; an error that ends the run is in its log."""
    with suppress(RunError):
        run.run()
