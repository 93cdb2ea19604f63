"""Make the samples of supervised fine-tuning from the rows of JSONL files when a step draws them.

A first pass finds the rows that have anything to train, their counts and the digest of all samples, as without
streaming, and keeps no sample: steps and schedule are the same, and a checkpoint fits a run with streaming and one
without.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, overload

from coati_rl.data.forms import Conversation, Form
from coati_rl.data.offline_samples import OfflineSamples
from coati_rl.data.row_formats import Columns, read_forms
from coati_rl.data.sample_digest import SampleDigest
from coati_rl.data.streamed_rows import StreamedRows
from coati_rl.samples import Sample


class StreamedForms(Sequence[Form]):
    """Hold the places of rows of `coati-rl sft`, all of which were checked.

    Args:
        source: a JSONL file, or a directory of them.
        flag: the command-line flag it came from, for messages.
        columns: of the rows.
        max_rows: read no more than the first of them; None: all.
    Raises: ConfigError naming the row that is wrong.
    """

    def __init__(self, source: str, *, flag: str, columns: Columns, max_rows: int | None) -> None:
        self._columns = columns
        self.has_messages = False
        self._rows = StreamedRows(source, flag=flag, check=self._check, max_rows=max_rows)

    def _check(self, where: str, row: Any) -> None:
        self.has_messages |= isinstance(self._form(where, row), Conversation)

    def _form(self, where: str, row: Any) -> Form:
        (form,) = read_forms([(where, row)], "sft", self._columns).forms
        return form

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Form: ...
    @overload
    def __getitem__(self, index: slice) -> list[Form]: ...
    def __getitem__(self, index: int | slice) -> Form | list[Form]:
        """Read a row, or several. Raises: RunError for a file that has changed."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._form(*self._rows[index])


class StreamedSamples(Sequence[Sample]):
    """Make a sample of each row that has anything to train, one source after the other, when it is asked for.

    Args:
        sources: of the rows.
        make: `offline_samples.sft_samples` of forms, of which `first` is the number of the first one.
    Raises: ConfigError naming the row of which the chat template makes no turns.
    """

    def __init__(self, sources: Sequence[StreamedForms], make: Callable[..., OfflineSamples]) -> None:
        self._sources, self._make = sources, make
        digest, self._usable, number = SampleDigest(), array("I"), 0
        self.num_cut = self.num_tokens = self.num_loss_tokens = 0
        sizes = list[int]()
        for source in sources:
            before = len(self._usable)
            for form in source:
                made = make([form], first=number)
                for sample in made.samples:
                    self._usable.append(number)
                    digest.add(sample)
                    self.num_tokens += len(sample)
                    self.num_loss_tokens += sample.num_loss_tokens
                self.num_cut += made.num_cut
                number += 1
            sizes.append(len(self._usable) - before)
        self.sizes, self.num_left_out, self.fingerprint = tuple(sizes), number - len(self._usable), digest.text

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._usable)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Make a sample, or several. Raises: RunError for a file that has changed."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = place = self._usable[index]
        for source in self._sources:
            if place < len(source):
                (sample,) = self._make([source[place]], first=number).samples
                return sample
            place -= len(source)
        raise IndexError(index)
