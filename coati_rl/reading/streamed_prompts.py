"""Render and tokenise the prompts of JSONL files when they are drawn.

A first pass finds the prompts that can be used and the digests of all, as without streaming, and keeps no prompt: the
order of draws is the same, and a checkpoint fits a run with streaming and one without.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import Any

from coati_rl.reading.dataset import checked_row, log_refused, render_prompts
from coati_rl.reading.draw_order import PromptDigest
from coati_rl.reading.lazy import LazyParts, Part
from coati_rl.reading.streamed_rows import StreamedRows
from coati_rl.reading.tasks import RowTasks, TaskRow
from coati_rl.types import Prompt

_AT_A_TIME = 256  # rows that are tokenised in one call of the first pass


def streamed_task_rows(
    source: str, *, flag: str, tasks: RowTasks, max_rows: int | None = None
) -> StreamedRows[TaskRow]:
    """Return rows that were checked; their kinds are the names of their tasks. Raises: ConfigError as `load_rows`."""
    read = partial(_task_row, tasks)
    return StreamedRows(source, flag=flag, read=read, kind_of=attrgetter("task.name"), max_rows=max_rows)


def _task_row(tasks: RowTasks, where: str, row: Any) -> TaskRow:
    return checked_row(row, tasks, where)


class StreamedPrompts(LazyParts[Prompt, TaskRow]):
    """Make the prompts of all sources, one source after the other, when they are asked for.

    Args:
        rows: of each source, by the name that uids begin with.
        tokenizer: a transformers tokenizer.
        max_prompt_tokens: longer prompts are left out and counted.
        input_template: as of `dataset.make_prompts`.
        shares: of the sources, which are a part of their fingerprint.
    Raises: ConfigError if the chat template refuses a row.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[TaskRow]],
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        input_template: str | None = None,
        shares: Sequence[Fraction] = (),
    ) -> None:
        self._tokenizer, self._input_template = tokenizer, input_template
        digest, tasks = PromptDigest(shares), dict[str, None]()
        super().__init__(self._read(rows, max_prompt_tokens, digest, tasks))
        self.fingerprint, self.ground_truths = digest.fingerprint, digest.ground_truths
        self.tasks = (*tasks,)

    def _read(
        self,
        rows: Mapping[str, Sequence[TaskRow]],
        max_prompt_tokens: int,
        digest: PromptDigest,
        tasks: dict[str, None],
    ) -> Iterator[Part[TaskRow]]:
        """Find the prompts that are not too long, and their tasks."""
        for name, each in rows.items():
            part = Part(rows=each, name=name)
            for number, prompt in enumerate(self._all(name, each)):
                if len(prompt.token_ids) <= max_prompt_tokens:
                    part.usable.append(number)
                    digest.add(prompt)
                    tasks[prompt.task] = None
            log_refused(name, len(each) - len(part.usable), len(each), max_prompt_tokens)
            yield part

    def find(self, uid: str) -> Prompt:
        """Return the prompt with a uid. Raises: KeyError."""
        name, _, number = uid.rpartition("-")
        for part in self._parts:
            row = int(number) if part.name == name and number.isdecimal() else -1
            place = bisect_left(part.usable, row)
            if row >= 0 and place < len(part.usable) and part.usable[place] == row:
                return self.made(part, row)
        raise KeyError(uid)

    def made(self, part: Part[TaskRow], number: int) -> Prompt:
        """Make a prompt."""
        (prompt,) = self._rendered([part.rows[number]], part.name, number)
        return prompt

    def _all(self, name: str, rows: Sequence[TaskRow]) -> Iterator[Prompt]:
        for first in range(0, len(rows), _AT_A_TIME):
            yield from self._rendered(rows[first : first + _AT_A_TIME], name, first)

    def _rendered(self, rows: Sequence[TaskRow], name: str, first: int) -> Sequence[Prompt]:
        return render_prompts(rows, self._tokenizer, name=name, first=first, input_template=self._input_template)
