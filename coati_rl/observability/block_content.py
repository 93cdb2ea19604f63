"""Lay out what a terminal shows of a running job: step, bar, time left, figures with their curves, waits, one answer.

Input: the records of steps, what the run waits for, a sampled answer. Output: a renderable for a number of columns.
"""

import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from coati_rl.observability.metrics import tokens_per_s
from coati_rl.observability.sampled_answer import SampledAnswer
from coati_rl.observability.sparkline import ASCII_BARS, BARS, Curve, sparkline
from coati_rl.observability.terminal_streams import encodable
from coati_rl.text import both_ends, shown_ends

_SPEED_S = 3600.0  # of steps that the time left is estimated from; a step may take minutes
_BAR_WIDTH = 100  # columns of its line at most
_WAIT_ROWS = 3  # of what the run waits for, at most
_RESOLUTION = 1e-4  # of figures; smaller differences make no curve
_GAP = "   "  # between figures

# Figures with a curve, by what a job has: key of the record, name, format.
_CURVES = (
    ("reward_mean", "reward", ".3f"),
    ("answer_accuracy", "accuracy", ".3f"),
    ("teacher_kl_mean", "teacher KL", ".3g"),
    ("loss", "loss", "+.4f"),
    ("rewards/accuracies", "accuracy", ".3f"),
    ("step_accuracy", "step accuracy", ".3f"),
    ("explained_variance", "explained variance", ".3f"),
)
_ALWAYS = ("reward_mean", "answer_accuracy", "loss")  # also before they have had a value
# Figures of the last step alone.
_NUMBERS = (
    ("perplexity", "perplexity", ".3f"),
    ("rewards/margins", "margin", ".3g"),
    ("epoch", "epoch", ".2f"),
    ("staleness_mean", "staleness", ".2f"),
    ("logprob_gap_mean", "gap", ".1e"),
)
_IDLE = (("trainer_idle_fraction", "trainers"), ("producer_idle_fraction", "producers"))


class BlockContent:
    """Hold what the block shows; one thread writes, another renders."""

    def __init__(
        self,
        num_steps: int | None,
        *,
        first_step: int = 0,
        encoding: str = "utf-8",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the number of steps (None: unknown), the step that the run goes on after, the terminal's encoding."""
        self._num_steps = num_steps
        self._encoding = encoding
        self._bars = BARS if encoding.lower().startswith("utf") else ASCII_BARS
        self._curves = {key: Curve() for key, _, _ in _CURVES}
        self._record: dict[str, Any] = {}
        self._answer: SampledAnswer | None = None
        self.wait = ""  # what the run does and waits for
        self._progress = Progress(
            TextColumn("{task.description}", table_column=_cropped()),
            BarColumn(bar_width=None),
            TimeElapsedColumn(table_column=_cropped()),
            TextColumn("left", table_column=_cropped()),
            TimeRemainingColumn(table_column=_cropped()),
            speed_estimate_period=_SPEED_S,
            expand=True,
            get_time=now,
            disable=True,  # it draws nothing itself
        )
        name = "starting" if first_step == 0 else self._step_name(first_step)
        self._task = self._progress.add_task(name, total=num_steps, completed=first_step)

    def recall(self, record: dict[str, Any]) -> None:
        """Take a step from before a run was resumed, for the curves."""
        for key, curve in self._curves.items():
            curve.add(record.get(key))

    def add(self, record: dict[str, Any]) -> None:
        """Take a step."""
        self.recall(record)
        step = record["step"]
        if record.get("update"):  # nothing came in for it
            self._record = self._record | {key: value for key, value in record.items() if value is not None}
        else:
            self._record = {**record, "tokens_per_s": tokens_per_s(record)}
        self._progress.update(self._task, completed=step, description=self._step_name(step))

    def show(self, answer: SampledAnswer) -> None:
        """Take another answer to be shown."""
        self._answer = answer

    def render(self, width: int) -> RenderableType:
        """Return the block in so many columns: each line of it fits."""
        bar = Constrain(self._progress.make_tasks_table(self._progress.tasks), _BAR_WIDTH)
        wait = textwrap.wrap(encodable(self.wait, self._encoding), width)[:_WAIT_ROWS] or [""]
        return Group(
            bar,
            *_in_lines([*self._figures()], width),
            *(Text(line, style="dim") for line in wait),
            *self._answer_lines(width),
        )

    def _step_name(self, step: int) -> str:
        return f"step {step}{f'/{self._num_steps}' if self._num_steps else ''}"

    def _figures(self) -> Iterator[str]:
        record = self._record
        for key, name, form in _CURVES:
            curve = self._curves[key]
            if key in record and (curve.last is not None or key in _ALWAYS):
                value = "-" if curve.last is None else format(curve.last, form)
                yield f"{name} {value} {self._drawn(curve)}".rstrip()
        if "tokens_per_s" in record:
            yield f"{record['tokens_per_s']:.0f} tok/s"
        idle = [f"{name} {record[key]:.0%}" for key, name in _IDLE if record.get(key) is not None]
        if idle:
            yield f"idle: {', '.join(idle)}"
        for key, name, form in _NUMBERS:
            if key in record:
                yield f"{name} {'-' if record[key] is None else format(record[key], form)}"

    def _drawn(self, curve: Curve) -> str:
        return sparkline(curve.points(), self._bars, resolution=_RESOLUTION)

    def _answer_lines(self, width: int) -> Iterator[Text]:
        answer = self._answer
        if answer is None:
            return
        yield Text(self._fitting(answer.title, width), style="bold")
        for name, text in (("prompt", answer.prompt), ("answer", answer.answer)):
            yield Text(f"  {name}  {self._fitting(text, max(width - len(name) - 4, 8))}")

    def _fitting(self, text: str, width: int) -> str:
        """Return a model's text in at most so many columns, whatever a terminal takes for characters beyond ASCII."""
        shown = encodable(shown_ends(text, width), self._encoding)
        return both_ends(shown, width if shown.isascii() else max(width // 2, 8))


def _cropped() -> Column:
    return Column(no_wrap=True, overflow="crop")


def _in_lines(figures: list[str], width: int) -> Iterator[Text]:
    """Yield lines with as many figures each as fit."""
    line = ""
    for figure in figures:
        longer = f"{line}{_GAP}{figure}" if line else figure
        if line and cell_len(longer) > width:
            yield Text(line)
            longer = figure
        line = longer
    if line:
        yield Text(line)
