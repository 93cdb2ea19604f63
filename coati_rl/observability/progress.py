"""Events of the coordinator -> the person at the terminal: a live display there, plain lines elsewhere."""

import logging
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coati_rl.observability.metrics import step_line

logger = logging.getLogger(__name__)


class ProgressDisplay:
    """Shows steps, evaluations, syncs that failed, producers that come and go."""

    def __init__(self, num_steps: int | None, console: Console | None = None, *, first_step: int = 0) -> None:
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
        self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            with suppress(OSError):
                self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays; where nobody takes it (a terminal that is gone, a full disk), the run goes on without."""
        with suppress(OSError):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, event: dict[str, Any]) -> None:
        """One event of the coordinator."""
        kind = event["event"]
        if kind == "step":
            self._show_step(event)
        elif kind == "evaluation":
            self.say(f"step {event['step']}: {event['task']} accuracy {event['accuracy']:.3f} (greedy)")
        elif kind == "checkpoint":
            self.say(f"step {event['step']}: checkpoint {event['path']}")
        elif kind == "producer_lost":
            self.say(
                f"producer {event['producer']} lost: {event['cause']}; {event['prompts_reissued']} prompts reissued"
            )
        elif kind == "sync" and event["problem"]:
            self.say(f"weight sync to version {event['policy_version']} failed and is repeated: {event['problem']}")
        elif kind == "gap":
            self.say(f"warning: {event['cause']}")
        elif kind == "rollout_failed":
            self.say(f"prompt {event['uid']} failed: {event['cause']}")
        elif kind == "finished" and event["groups_dropped"]:
            filtered = f" ({event['groups_filtered']} more were filtered)" if event["groups_filtered"] else ""
            self.say(f"{event['groups_dropped']} prompts at the end did not fill a step: dropped{filtered}")

    def _show_step(self, record: dict[str, Any]) -> None:
        line = step_line(record, self._num_steps)
        if not self._console.is_terminal:
            self.say(line)
            return
        numbers = line.split("  ", 1)[1]
        self._progress.update(self._task, completed=record["step"], description="training", numbers=numbers)
