"""Show the progress of a run and what it waits for: a live display at a terminal, plain lines elsewhere.

Input: events of the coordinator, and its status several times a second. What a run waits for is shown after some
seconds without another line: a terminal's last line is updated; elsewhere, and in the log, a line is written for each
new reason, and for the same one once a minute.
"""

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from coati_rl.observability.metrics import step_line
from coati_rl.text import count

logger = logging.getLogger(__name__)

QUIET_S = 3.0  # without another line, before what a run waits for is shown
MIN_WAIT_S = 1.0  # for which a reason has to hold before it is written: some last milliseconds
REPEAT_S = 60.0  # before the same reason, except for its numbers, is written again
_NUMBERS = re.compile(r"s? \d+(, \d+)*")  # with the plural before them


class ProgressDisplay:
    """Show steps, evaluations, failed syncs, lost producers, and what the run waits for."""

    def __init__(
        self,
        num_steps: int | None,
        console: Console | None = None,
        *,
        first_step: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the number of steps; `now` is a monotonic clock, in seconds."""
        self._now = now
        self._shown_at = now()  # time of the last line, except those of what the run waits for
        self._reason, self._reason_since = "", now()  # without its numbers
        self._told_at: dict[str, float] = {}  # reason -> its last line
        self._wait = Text("", style="dim")
        self._console = console or Console()
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=num_steps, completed=first_step, numbers="")
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            with suppress(OSError):
                self._live.stop()

    def print_line(self, text: str) -> None:
        """Print a permanent line; ignore a closed terminal or a full disk."""
        self._shown_at, self._wait = self._now(), Text("")
        self._print(text)

    def show_wait(self, text: str) -> None:
        """Take what the run does and waits for, and show it if no other line was shown for a while."""
        now, reason = self._now(), _NUMBERS.sub(" #", text)
        if reason != self._reason:
            self._reason, self._reason_since = reason, now
        if now - self._shown_at < QUIET_S or not text:
            return
        self._wait = Text(text, style="dim")
        is_new = now - self._told_at.get(reason, -REPEAT_S) >= REPEAT_S
        if is_new and now - self._reason_since >= MIN_WAIT_S:
            self._told_at[reason] = now
            logger.info("%s", text)
            if not self._console.is_terminal:
                self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, event: dict[str, Any]) -> None:
        """Show one event of the coordinator."""
        kind = event["event"]
        if kind == "step":
            self._show_step(event)
        elif kind == "evaluation" and "metrics" in event:
            metrics = event["metrics"].items()
            numbers = [f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in metrics]
            self.print_line(f"step {event['step']}: {event['task']} {'  '.join(numbers)}")
        elif kind == "evaluation":
            self.print_line(f"step {event['step']}: {event['task']} {_accuracy(event)}")
        elif kind == "checkpoint":
            self.print_line(f"step {event['step']}: checkpoint {event['path']}")
        elif kind == "best":
            self.print_line(f"step {event['step']}: the best checkpoint, {event['metric']} {event['value']:.3f}")
        elif kind == "producer_lost":
            self.print_line(
                f"producer {event['producer']} lost: {event['cause']}; {event['prompts_reissued']} prompts reissued"
            )
        elif kind == "sync" and event["problem"]:
            self.print_line(
                f"weight sync to version {event['policy_version']} failed and is repeated: {event['problem']}"
            )
        elif kind == "gap":
            self.print_line(f"warning: {event['cause']}")
        elif kind == "rollout_failed":
            self.print_line(f"prompt {event['uid']} failed: {event['cause']}")
        elif kind == "finished" and event["groups_dropped"]:
            filtered = f" ({event['groups_filtered']} more were filtered)" if event["groups_filtered"] else ""
            self.print_line(f"{event['groups_dropped']} prompts at the end did not fill a step: dropped{filtered}")

    def _show_step(self, record: dict[str, Any]) -> None:
        line = step_line(record, self._num_steps)
        if not self._console.is_terminal:
            self.print_line(line)
            return
        self._shown_at, self._wait = self._now(), Text("")
        numbers = line.split("  ", 1)[1]
        self._progress.update(self._task, completed=record["step"], description="training", numbers=numbers)

    def _render(self) -> RenderableType:
        return Group(self._progress, self._wait) if self._wait else self._progress


def _accuracy(summary: dict[str, Any]) -> str:
    """Return the accuracy of an evaluation with how it was sampled, and the pass@k of the largest k."""
    text, num_samples = f"accuracy {summary['accuracy']:.3f}", summary.get("num_samples")
    if num_samples is None:
        return f"{text} (greedy)"
    passed = summary.get(f"pass@{num_samples}")
    text += "" if passed is None else f", pass@{num_samples} {passed:.3f}"
    return f"{text} ({count(num_samples, 'sample')} at temperature {summary['temperature']:g})"
