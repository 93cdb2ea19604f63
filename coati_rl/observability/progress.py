"""Show the progress of a run and what it waits for: a live block at a terminal, plain lines elsewhere.

Input: events of the coordinator, and its status several times a second. What a run waits for is shown after some
seconds without another line: in the block at a terminal; elsewhere, and in the log, a line is written for each new
reason, and for the same one every 30 seconds.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rich.console import Console

from coati_rl.observability.block_content import BlockContent
from coati_rl.observability.collapse import CollapseWatch
from coati_rl.observability.event_lines import event_line
from coati_rl.observability.live_block import LiveBlock
from coati_rl.observability.metrics import step_line
from coati_rl.observability.run_summary import RunSummary
from coati_rl.observability.sampled_answer import SampledAnswer
from coati_rl.observability.terminal_streams import encodable, printed_above
from coati_rl.observability.zero_loss import ZeroLoss
from coati_rl.text import printable

logger = logging.getLogger(__name__)

QUIET_S = 3.0  # without another line, before what a run waits for is shown
MIN_WAIT_S = 1.0  # for which a reason has to hold before it is written: some last milliseconds
REPEAT_S = 30.0  # before the same reason, except for its numbers, is written again
STEP_LINE_S = 1.0  # between lines of steps where there is no terminal; the log has all, and the last one is shown
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
        is_plain: bool = False,
        closing: Callable[[], Sequence[str]] = tuple,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the number of steps.

        Args:
            num_steps: None: unknown.
            console: the terminal; None: standard output.
            first_step: that the run goes on after.
            threshold: as of `CollapseWatch`.
            is_plain: lines at a terminal, too.
            closing: returns the last lines of the summary: where the results are.
            now: a monotonic clock, in seconds.
        """
        self._now = now
        self._shown_at = now()  # time of the last line, except those of what the run waits for
        self._step_line_at = -STEP_LINE_S
        self._reason, self._reason_since = "", now()  # without its numbers
        self._told_at: dict[str, float] = {}  # reason -> its last line
        self._console = console or Console(file=sys.stdout)
        self._num_steps = num_steps
        self._summary, self._closing = RunSummary(now), closing
        self._watch, self._zero_loss = CollapseWatch(threshold), ZeroLoss()
        self._content = BlockContent(num_steps, first_step=first_step, encoding=self._console.encoding, now=now)
        is_live = self._console.is_terminal and not is_plain
        self._block = LiveBlock(self._console, self._content.render) if is_live else None
        self._while_open = ExitStack()

    def __enter__(self) -> "ProgressDisplay":
        if self._block is not None:
            self._while_open.callback(self._block.stop)
            self._block.start()
            self._while_open.enter_context(printed_above(self._block.print_above))
        return self

    def __exit__(self, *_: object) -> None:
        with self._while_open:
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
                self._content.recall(event)

    def print_line(self, text: str) -> None:
        """Print a permanent line, and log it, `printable`; ignore a closed terminal or a full disk."""
        text = printable(text)
        self._shown_at, self._content.wait = self._now(), ""
        logger.info("%s", text)
        self._print(text)

    def show_wait(self, text: str) -> None:
        """Take what the run does and waits for, and show it if no other line was shown for a while."""
        text = printable(text)
        now, reason = self._now(), _NUMBERS.sub(" #", text)
        if reason != self._reason:
            self._reason, self._reason_since = reason, now
        if now - self._shown_at < QUIET_S or not text:
            return
        if (seconds := round(now - self._reason_since)) > 0:
            text = f"{text} ({seconds} s)"
        is_changed, self._content.wait = text != self._content.wait, text
        if self._block is not None and is_changed:
            self._block.refresh()
        is_new = now - self._told_at.get(reason, -REPEAT_S) >= REPEAT_S
        if is_new and now - self._reason_since >= MIN_WAIT_S:
            self._told_at[reason] = now
            logger.info("%s", text)
            if self._block is None:
                self._print(text)

    def show_answer(self, answer: SampledAnswer) -> None:
        """Show a sampled answer in the block; plain lines have none."""
        self._content.show(answer)

    def show(self, event: dict[str, Any]) -> None:
        """Show one event of the coordinator."""
        self._summary.add(event)
        if event["event"] == "step":
            self._show_step(event)
            if (why := self._zero_loss.line(event)) is not None:
                self.print_line(why)
            for warning in self._watch.warnings(event):
                self.print_line(f"warning: {warning}")
        elif (line := event_line(event)) is not None:
            self.print_line(line)

    def _print_summary(self) -> None:
        closing: Sequence[str] = ()
        with suppress(OSError):  # the directories of the results cannot be read
            closing = self._closing()
        for line in self._summary.lines(closing):
            logger.info("%s", line)
            self._print(line)

    def _print(self, text: str) -> None:
        if self._block is not None:
            self._block.print_above(text)
            return
        with suppress(OSError, ValueError):  # not by rich, which ends the process where a pipe is closed
            self._console.file.write(encodable(f"{text}\n", self._console.encoding))
            self._console.file.flush()

    def _show_step(self, record: dict[str, Any]) -> None:
        line, step = step_line(record, self._num_steps), record["step"]
        logger.info("%s", line)
        now = self._now()
        self._shown_at = self._reason_since = now  # "step 5 is being trained" is another wait than that of step 4
        self._content.wait = ""
        self._content.add(record)
        if self._block is not None:
            self._block.refresh()
        elif now - self._step_line_at >= STEP_LINE_S or step == self._num_steps:
            self._step_line_at = now
            self._print(line)
