"""Sample, score and write the responses to a list of prompts with one engine.

Consumes: prompts. Waits for: the engine and the scorer. Is unblocked by: finished samples and scores; a time limit ends
a wait in which nothing is finished. Produces: the rows of `BatchOutput`, prompt by prompt.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coati_rl.coordinator.leases import LeaseTable
from coati_rl.errors import RunError
from coati_rl.protocols import GenerationEngine, GroupScorer
from coati_rl.types import Prompt, RolloutGroup
from producer.batch.coordinator import BatchCoordinator
from producer.batch.output import BatchOutput
from producer.batch.rows import Selection, group_record, make_rows
from producer.batch.summary import summarise
from producer.rollout_loop import RolloutLoop

_REPORT_S = 10.0  # between two lines of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchJob:
    """Describe what is sampled and written."""

    prompts: Sequence[Prompt]
    leases: LeaseTable
    selection: Selection
    group_size: int
    max_sequences: int  # samples in flight
    max_failure_rate: float
    stall_timeout_s: float


def run_batch(
    job: BatchJob,
    output: BatchOutput,
    engine: GenerationEngine,
    reward: GroupScorer,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Sample and write all prompts that the output does not have.

    Args:
        job: what to do.
        output: open.
        engine: loaded.
        reward: scores the groups.
        report: gets a line of progress every ten seconds.
    Returns: the figures of all prompts, earlier ones included; see `summarise`.
    Raises: RunError if the engine or the disk fails, too many prompts fail, or nothing is finished for too long.
    """
    progress = _Progress(job, output, report)
    coordinator = BatchCoordinator(
        job.prompts[len(output.records) :],
        job.leases,
        progress.write,
        max_in_flight=max(1, job.max_sequences // job.group_size),
    )
    RolloutLoop(
        0,
        coordinator,
        engine,
        reward,
        max_sequences=job.max_sequences,
        group_size=job.group_size,
        on_turn=progress.check,
    ).run()
    return summarise(output.records, group_size=job.group_size, is_scored=job.selection.is_scored)


class _Progress:
    """Write what becomes of the prompts, report it, and find out that nothing does."""

    def __init__(self, job: BatchJob, output: BatchOutput, report: Callable[[str], None]) -> None:
        self._job = job
        self._output = output
        self._report = report
        self._num_failed = 0
        self._num_tokens = 0
        self._began_at = self._reported_at = self._written_at = time.monotonic()
        for record in output.records:
            if "error" in record:
                self._failed(record["uid"], record["error"])

    def write(self, prompt: Prompt, outcome: RolloutGroup | str) -> None:
        """Write the rows of a prompt, or that it failed."""
        self._written_at = time.monotonic()
        if isinstance(outcome, str):
            self._output.add({"uid": prompt.uid, "error": outcome}, [])
            self._failed(prompt.uid, outcome)
            return
        record = group_record(outcome)
        self._num_tokens += record["num_tokens"]
        self._output.add({"uid": prompt.uid, **record}, make_rows(outcome, self._job.selection))

    def _failed(self, uid: str, error: str) -> None:
        """Count a failed prompt. Raises: RunError if there are too many, by an earlier command too."""
        self._num_failed += 1
        allowed = int(Fraction(str(self._job.max_failure_rate)) * len(self._job.prompts))
        if self._num_failed > allowed:
            raise RunError(
                f"{self._num_failed} prompts failed, and --max-failure-rate {self._job.max_failure_rate:g} allows "
                f"{allowed} of {len(self._job.prompts)}; the last one: {uid}: {error}"
            )

    def check(self) -> None:
        """Report now and then. Raises: RunError if no prompt has been written for too long."""
        now = time.monotonic()
        if now - self._written_at > self._job.stall_timeout_s:
            raise RunError(f"no prompt was finished for {self._job.stall_timeout_s:g} s (--stall-timeout-s)")
        if now - self._reported_at > _REPORT_S:
            self._reported_at = now
            rate = self._num_tokens / (now - self._began_at)
            num_done, num_prompts = len(self._output.records), len(self._job.prompts)
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._report(f"{num_done} of {num_prompts} prompts{failed}, {rate:.0f} tokens/s")
