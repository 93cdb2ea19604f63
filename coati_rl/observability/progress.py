"""Show the progress of a run and what it waits for: a live display at a terminal, plain lines elsewhere.

Input: events of the coordinator, and its status several times a second. What a run waits for is shown after some
seconds without another line: a terminal's last line is updated; elsewhere, and in the log, a line is written for each
new reason, and for the same one every 30 seconds.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from coati_rl.observability.collapse import CollapseWatch
from coati_rl.observability.metrics import step_line
from coati_rl.observability.run_summary import RunSummary
from coati_rl.text import count

logger = logging.getLogger(__name__)

QUIET_S = 3.0  # without another line, before what a run waits for is shown
MIN_WAIT_S = 1.0  # for which a reason has to hold before it is written: some last milliseconds
REPEAT_S = 30.0  # before the same reason, except for its numbers, is written again
STEP_LINE_S = 1.0  # between lines of steps where there is no terminal; the log has all, and the last one is shown
_SPEED_S = 3600.0  # of steps that the time left is estimated from; a step may take minutes
_NOTED = 5e-4  # difference of two figures that are shown with three digits
_BAR_WIDTH = 100  # columns of its line at most
_NUMBERS = re.compile(r"s? \d+(, \d+)*")  # with the plural before them


class ProgressDisplay:
    """Show steps, evaluations, failed syncs, lost producers, what the run waits for, and at the end a summary."""

    def __init__(
        self,
        num_steps: int | None,
        console: Console | None = None,
        *,
        first_step: int = 0,
        threshold: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the number of steps.

        Args:
            num_steps: None: unknown.
            console: the terminal; None: standard output.
            first_step: that the run goes on after.
            threshold: as of `CollapseWatch`.
            now: a monotonic clock, in seconds.
        """
        self._now = now
        self._shown_at = now()  # time of the last line, except those of what the run waits for
        self._step_line_at = -STEP_LINE_S
        self._reason, self._reason_since = "", now()  # without its numbers
        self._told_at: dict[str, float] = {}  # reason -> its last line
        self._numbers, self._wait = Text(""), Text("", style="dim")
        self._console = console or Console()
        self._num_steps = num_steps
        self._summary = RunSummary(now)
        self._watch = CollapseWatch(threshold)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=_SPEED_S,
            expand=True,
            get_time=now,
        )
        name = "starting" if first_step == 0 else self._step_name(first_step)
        self._task = self._progress.add_task(name, total=num_steps, completed=first_step)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            with suppress(OSError):
                self._live.stop()
        if self._summary.has_figures:
            self._print_summary()

    @property
    def last_step(self) -> int | None:
        """Return the last step that was shown; None if there is none."""
        return self._summary.last_step

    def recall(self, events: Iterable[dict[str, Any]]) -> None:
        """Take the steps and evaluations before a run was resumed, which are not shown again."""
        for event in events:
            self._summary.recall(event)
            if event["event"] == "step":
                self._watch.warnings(event)

    def print_line(self, text: str) -> None:
        """Print a permanent line, and log it; ignore a closed terminal or a full disk."""
        self._shown_at, self._wait = self._now(), Text("")
        logger.info("%s", text)
        self._print(text)

    def show_wait(self, text: str) -> None:
        """Take what the run does and waits for, and show it if no other line was shown for a while."""
        now, reason = self._now(), _NUMBERS.sub(" #", text)
        if reason != self._reason:
            self._reason, self._reason_since = reason, now
        if now - self._shown_at < QUIET_S or not text:
            return
        if (seconds := round(now - self._reason_since)) > 0:
            text = f"{text} ({seconds} s)"
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
        self._summary.add(event)
        if kind == "step":
            self._show_step(event)
            for warning in self._watch.warnings(event):
                self.print_line(f"warning: {warning}")
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
        line, step = step_line(record, self._num_steps), record["step"]
        logger.info("%s", line)
        now = self._now()
        self._shown_at = self._reason_since = now  # "step 5 is being trained" is another wait than that of step 4
        self._wait = Text("")
        if self._console.is_terminal:
            self._numbers = Text(line.split("  ", 1)[1])
            self._progress.update(self._task, completed=step, description=self._step_name(step))
        elif now - self._step_line_at >= STEP_LINE_S or step == self._num_steps:
            self._step_line_at = now
            self._print(line)

    def _step_name(self, step: int) -> str:
        return f"step {step}{f'/{self._num_steps}' if self._num_steps else ''}"

    def _print_summary(self) -> None:
        """Print what the run came to: a table at a terminal, else lines, which the log has in any case."""
        lines = self._summary.lines()
        for line in lines:
            logger.info("%s", line)
        with suppress(OSError):
            if self._console.is_terminal:
                self._console.print(self._summary.table())
            else:
                self._print("\n".join(lines))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [
            Constrain(self._progress, _BAR_WIDTH),
            *(text for text in (self._numbers, self._wait) if text),
        ]
        return Group(*parts)


def _accuracy(summary: dict[str, Any]) -> str:
    """Return the figures of an evaluation with how it was sampled: accuracy, pass@k of the largest k, mean reward."""
    num_samples = summary.get("num_samples")
    shown = {"accuracy": summary["accuracy"], "pass": summary.get(f"pass@{num_samples}"), "reward": _graded(summary)}
    names = {"pass": f"pass@{num_samples}"}
    text = ", ".join(f"{names.get(key, key)} {value:.3f}" for key, value in shown.items() if value is not None)
    text += " (greedy)" if num_samples is None else _sampled(num_samples, summary["temperature"])
    return text + _out_of_reach(summary)


def _graded(summary: dict[str, Any]) -> float | None:
    """Return the mean reward; None where it says what the accuracy says, as of rewards 1 and 0."""
    reward, is_whole = summary.get("reward_mean"), not summary.get("num_failed") and not summary.get("num_invalid")
    if reward is None or not (is_whole or "correct_from" in summary):
        return None
    return float(reward) if abs(reward - summary["accuracy"]) >= _NOTED else None


def _sampled(num_samples: int, temperature: float) -> str:
    return f" ({count(num_samples, 'sample')} at temperature {temperature:g})"


def _out_of_reach(summary: dict[str, Any]) -> str:
    """Say that graded rewards are all too small to count as correct; nothing if they are all the same, as of a 0."""
    needed, largest = summary.get("correct_from"), summary.get("reward_max")
    if needed is None or largest is None or largest >= needed or summary["accuracy"] > 0:
        return ""
    if largest <= 0 and largest == summary["reward_mean"]:
        return ""
    return f"; nothing reaches --correct-from {needed:g}: the largest reward is {largest:.3g}"
