"""Make the samples of supervised fine-tuning from the rows of JSONL files when a step draws them.

A first pass finds the rows that have anything to train, their counts and the digest of all samples, as without
streaming, and keeps no sample: steps and schedule are the same, and a checkpoint fits a run with streaming and one
without.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from coati_rl.reading.forms import Form
from coati_rl.reading.lazy import LazyParts, Part
from coati_rl.reading.offline_samples import OfflineSamples
from coati_rl.reading.row_formats import Columns, read_forms
from coati_rl.reading.sample_digest import SampleDigest
from coati_rl.reading.streamed_rows import StreamedRows
from coati_rl.samples import Sample


def streamed_forms(source: str, *, flag: str, columns: Columns, max_rows: int | None) -> StreamedRows[Form]:
    """Return the rows of `coati-rl sft`, all of which were checked; the arguments are those of `StreamedRows`.

    Raises: ConfigError naming the row that is wrong.
    """
    return StreamedRows(source, flag=flag, read=partial(_form, columns), max_rows=max_rows)


def _form(columns: Columns, where: str, row: Any) -> Form:
    (form,) = read_forms([(where, row)], "sft", columns).forms
    return form


class StreamedSamples(LazyParts[Sample, Form]):
    """Make a sample of each row that has anything to train, one source after the other, when it is asked for.

    Args:
        sources: of the rows.
        make: `offline_samples.sft_samples` of forms, of which `first` is the number of the first one.
    Raises: ConfigError naming the row of which the chat template makes no turns.
    """

    def __init__(self, sources: Sequence[Sequence[Form]], make: Callable[..., OfflineSamples]) -> None:
        self._make, digest = make, SampleDigest()
        self.num_cut = self.num_tokens = self.num_loss_tokens = 0
        super().__init__(self._read(sources, digest))
        self.fingerprint = digest.text

    def _read(self, sources: Sequence[Sequence[Form]], digest: SampleDigest) -> Iterator[Part[Form]]:
        """Find the rows with samples, and count them."""
        first = 0
        for source in sources:
            part = Part(rows=source, first=first)
            for number, form in enumerate(source):
                made = self._make([form], first=first + number)
                for sample in made.samples:
                    part.usable.append(number)
                    digest.add(sample)
                    self.num_tokens += len(sample)
                    self.num_loss_tokens += sample.num_loss_tokens
                self.num_cut += made.num_cut
            first += len(source)
            yield part

    def made(self, part: Part[Form], number: int) -> Sample:
        """Make a sample."""
        (sample,) = self._make([part.rows[number]], first=part.first + number).samples
        return sample
