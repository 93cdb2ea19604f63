"""Render and tokenise the prompts of JSONL files when they are drawn.

A first pass finds the prompts that can be used and the digests of all, as without streaming, and keeps no prompt: the
order of draws is the same, and a checkpoint fits a run with streaming and one without.
"""

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, overload

from coati_rl.data.dataset import checked_row, log_refused, render_prompts
from coati_rl.data.draw_order import PromptDigest
from coati_rl.data.streamed_rows import StreamedRows
from coati_rl.data.tasks import RowTasks, TaskRow
from coati_rl.types import Prompt

logger = logging.getLogger(__name__)

_AT_A_TIME = 256  # rows that are tokenised in one call of the first pass


class StreamedTaskRows(Sequence[TaskRow]):
    """Hold the places of rows that were checked, and find their tasks when they are read again."""

    def __init__(self, source: str, *, flag: str, tasks: RowTasks, max_rows: int | None = None) -> None:
        """Check all rows. Raises: ConfigError as `dataset.load_rows`."""
        self._tasks = tasks
        self.task_names: set[str] = set()
        self._rows = StreamedRows(source, flag=flag, check=self._check, max_rows=max_rows)

    def _check(self, where: str, row: Any) -> None:
        self.task_names.add(checked_row(row, self._tasks, where).task.name)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TaskRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskRow]: ...
    def __getitem__(self, index: int | slice) -> TaskRow | list[TaskRow]:
        """Read a row, or several. Raises: RunError for a file that has changed."""
        if isinstance(index, slice):
            return [checked_row(row, self._tasks, where) for where, row in self._rows[index]]
        where, row = self._rows[index]
        return checked_row(row, self._tasks, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    name: str  # that uids begin with
    rows: StreamedTaskRows
    usable: "array[int]"  # numbers of the rows that are not too long


class StreamedPrompts(Sequence[Prompt]):
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
        rows: Mapping[str, StreamedTaskRows],
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        input_template: str | None = None,
        shares: Sequence[Fraction] = (),
    ) -> None:
        self._tokenizer, self._input_template = tokenizer, input_template
        digest, parts, tasks = PromptDigest(shares), list[_Part](), dict[str, None]()
        for name, each in rows.items():
            usable = array("I")
            for number, prompt in enumerate(self._all(name, each)):
                if len(prompt.token_ids) <= max_prompt_tokens:
                    usable.append(number)
                    digest.add(prompt)
                    tasks[prompt.task] = None
            log_refused(name, len(each) - len(usable), len(each), max_prompt_tokens)
            parts.append(_Part(name=name, rows=each, usable=usable))
        self._parts = parts
        self.fingerprint, self.ground_truths = digest.fingerprint, digest.ground_truths
        self.tasks = (*tasks,)
        self.sizes = tuple(len(part.usable) for part in parts)
        self.num_refused = sum(len(part.rows) - len(part.usable) for part in parts)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return sum(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Make a prompt, or several. Raises: RunError for a file that has changed."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = index
        for part in self._parts:
            if 0 <= place < len(part.usable):
                return self._made(part.name, part.rows[part.usable[place]], part.usable[place])
            place -= len(part.usable)
        raise IndexError(index)

    def find(self, uid: str) -> Prompt:
        """Return the prompt with a uid. Raises: KeyError."""
        name, _, number = uid.rpartition("-")
        for part in self._parts:
            row = int(number) if part.name == name and number.isdecimal() else -1
            place = bisect_left(part.usable, row)
            if row >= 0 and place < len(part.usable) and part.usable[place] == row:
                return self._made(name, part.rows[row], row)
        raise KeyError(uid)

    def _made(self, name: str, row: TaskRow, number: int) -> Prompt:
        (prompt,) = render_prompts([row], self._tokenizer, name=name, first=number, input_template=self._input_template)
        return prompt

    def _all(self, name: str, rows: StreamedTaskRows) -> Iterator[Prompt]:
        for first in range(0, len(rows), _AT_A_TIME):
            yield from render_prompts(
                rows[first : first + _AT_A_TIME],
                self._tokenizer,
                name=name,
                first=first,
                input_template=self._input_template,
            )
