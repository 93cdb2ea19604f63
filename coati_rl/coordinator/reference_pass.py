"""Have a reference model's log-probabilities computed once, before the first step, and keep them in a file.

The samples of all sets are cut into parts, of which every dp rank scores a slice. The file holds the log-probabilities
of all loss tokens in the order of sets and samples; a resumed run reads it instead. N loss tokens of a sample.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from coati_rl.batching.dataset_source import DatasetSettings, fingerprint, slice_batches
from coati_rl.disk import disk_errors
from coati_rl.samples import RaggedBatch, Sample

FILE = "reference_logprobs.npz"
ARRAY = "ref_logprobs"  # the loss array that objectives read


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePart:
    """Hold a part of a set: its batches, and which of the set's samples each dp rank has."""

    name: str  # of the set
    batches: Sequence[RaggedBatch]
    slices: Sequence[tuple[int, int]]


def model_key(directory: Path) -> str:
    """Return a text that is another one if files of weights were replaced, from their names, sizes and times."""
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    stats = [(path.name, path.stat()) for path in files]
    return "\n".join([str(directory.resolve()), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)])


class ReferencePass:
    """Order the parts, collect their scores, and give the samples their `ref_logprobs`."""

    def __init__(
        self, sets: Mapping[str, Sequence[Sample]], settings: DatasetSettings, path: Path, *, model: str
    ) -> None:
        """Read the file if it is of these samples and this model, see `model_key`; else plan the parts."""
        self._sets = {name: list(samples) for name, samples in sets.items()}
        self._path = path
        self._key = "\n".join([model, *(f"{name}: {fingerprint(samples)}" for name, samples in sets.items())])
        self._open: dict[int, ReferencePart] = {}  # ordered, by number
        self._parts: deque[ReferencePart] = deque()
        self._scores: dict[str, list[np.ndarray | None]] = {
            name: [None] * len(samples) for name, samples in self._sets.items()
        }
        if not self._read():
            for name, samples in self._sets.items():
                for batches, slices in slice_batches(samples, settings):
                    self._parts.append(ReferencePart(name=name, batches=batches, slices=slices))
        self._num_parts = len(self._parts)

    @property
    def is_ordered(self) -> bool:
        """Return True if every part has been ordered."""
        return not self._parts

    @property
    def is_complete(self) -> bool:
        """Return True if all samples have their scores."""
        return not self._parts and not self._open

    @property
    def progress(self) -> str:
        """Describe the progress in a clause."""
        done = self._num_parts - len(self._parts) - len(self._open)
        return f"the reference's log-probabilities are being computed, {done} of {self._num_parts} parts done"

    def next_part(self) -> tuple[int, Sequence[RaggedBatch]]:
        """Return the next part's number and its batch for each dp rank."""
        part = self._parts.popleft()
        number = self._num_parts - len(self._parts) - 1
        self._open[number] = part
        return number, part.batches

    def add(self, number: int, dp_rank: int, logprobs: Sequence[np.ndarray]) -> bool:
        """Add the scores of a rank's samples, float32[N] each; ranks that share them may all report.

        Returns: True if these were the last ones, which have been written to the file.
        """
        part = self._open.get(number)
        if part is None:
            return False
        scores = self._scores[part.name]
        start, end = part.slices[dp_rank]
        scores[start:end] = logprobs
        if any(score is None for first, last in part.slices for score in scores[first:last]):
            return False
        del self._open[number]
        if self.is_complete:
            self._write()
        return self.is_complete

    def samples(self, name: str) -> list[Sample]:
        """Return the samples of a set with their scores."""
        return [
            replace(sample, arrays={**sample.arrays, ARRAY: score})
            for sample, score in zip(self._sets[name], self._scores[name], strict=True)
            if score is not None
        ]

    def _write(self) -> None:
        joined = [score for scores in self._scores.values() for score in scores if score is not None]
        partial = self._path.with_name(f".{self._path.name}.partial")
        with disk_errors(self._path):
            with partial.open("wb") as file:
                np.savez(file, key=np.array(self._key), logprobs=np.concatenate(joined))
            partial.replace(self._path)

    def _read(self) -> bool:
        """Take the scores from the file. Returns: False if it is missing, damaged, or of other samples."""
        try:
            with np.load(self._path, allow_pickle=False) as arrays:
                key, joined = str(arrays["key"]), arrays["logprobs"]
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, BadZipFile):  # as NumPy and zipfile raise them
            return False
        counts = [sample.num_loss_tokens for samples in self._sets.values() for sample in samples]
        if key != self._key or len(joined) != sum(counts):
            return False
        parts = iter(np.split(joined, np.cumsum(counts)[:-1]))
        self._scores = {name: [next(parts) for _ in samples] for name, samples in self._sets.items()}
        return True
