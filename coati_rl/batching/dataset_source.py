"""Decide the trainers' work from a dataset alone, without producers or a coordinator.

The coordinator holds all samples; item i of the work is a pure function of the settings, so that a resumed run
continues by its step.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from coati_rl.batching.packing import plan_batches
from coati_rl.errors import ConfigError
from coati_rl.reading.mixing import Mixing
from coati_rl.reading.sample_digest import SampleDigest
from coati_rl.reading.streamed_samples import StreamedSamples
from coati_rl.samples import RaggedBatch, Sample
from coati_rl.work import FinishWork, SaveWork, TrainWork, Work

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSettings:
    """Hold the sizes of a step and the length of the run."""

    dp: int
    trainers_per_dp_rank: int  # tp * pp * cp
    batch_size: int  # samples per optimizer step, over all dp ranks
    micro_batch_size: int  # samples per micro-batch
    num_epochs: int = 1
    max_steps: int | None = None
    save_interval: int | None = None  # optimizer steps; None: only at the end
    max_tokens_per_microbatch: int | None = None
    one_sample_per_row: bool = False
    shares_prefixes: bool = False  # see `plan_batches`
    unit: int = 1  # samples that stay together in a micro-batch, see `plan_batches`
    denominator: Literal["tokens", "units"] = "tokens"  # the loss is averaged over its tokens, or over units
    seed: int = 0
    mixing: Mixing | None = None  # of several sources; None: every sample once per epoch


class DatasetSource:
    """Train every sample once per epoch, in an order that only the seed decides; an incomplete last step is dropped.

    Where sources are mixed, an epoch has as many samples, drawn by the shares of their sources.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        settings: DatasetSettings,
        *,
        resumed: dict[str, Any] | None = None,
        report: Report = lambda record: None,
    ) -> None:
        """Take the samples; `resumed` is the data state of the checkpoint, `report` takes step records.

        Raises: ConfigError if there is not one complete step, or the checkpoint is of other data; ValueError if samples
            and step are not multiples of the unit.
        """
        if len(samples) % settings.unit or settings.batch_size % settings.unit:
            raise ValueError(
                f"{len(samples)} samples and steps of {settings.batch_size} must be multiples of {settings.unit}"
            )
        self._samples, self._settings, self._report = samples, settings, report
        self._mixed = None if settings.mixing is None else settings.mixing.order(settings.seed)
        num_steps = len(samples) * settings.num_epochs // settings.batch_size
        self.num_steps = num_steps if settings.max_steps is None else min(num_steps, settings.max_steps)
        if self.num_steps == 0:
            raise ConfigError(
                f"the dataset has {len(samples)} samples, which do not fill one step of {settings.batch_size}; "
                "lower the batch size, or raise the number of epochs"
            )
        own = {"seed": settings.seed, "num_samples": len(samples), "fingerprint": fingerprint(samples)}
        mixing = None if settings.mixing is None else settings.mixing.as_text
        self._order = own | {"batch_size": settings.batch_size, "mixing": mixing}
        self._first_step = 0 if resumed is None else int(resumed["step"])
        if resumed is not None and (changed := [n for n, value in self._order.items() if resumed.get(n) != value]):
            raise ConfigError(
                f"the checkpoint was trained on other data: {', '.join(changed)} changed; use the same data"
            )
        self._items = [item for step in range(self._first_step, self.num_steps) for item in self._items_of(step)]

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work:
        """Return item `index` of a rank's work, without waiting."""
        if index >= len(self._items):
            return FinishWork(step=self.num_steps)
        kind, step = self._items[index]
        if kind == "save":
            return SaveWork(step=step, data_state=self.data_state(step))
        return TrainWork(batch=self.batches(step)[rank // self._settings.trainers_per_dp_rank])

    @property
    def settings(self) -> DatasetSettings:
        """Return the sizes of a step."""
        return self._settings

    @property
    def first_step(self) -> int:
        """Return the number of optimizer steps taken before this run."""
        return self._first_step

    def statistics(self, step: int) -> dict[str, Any]:
        """Return the figures of optimizer step `step`, from 0, that the data decides."""
        batches, settings = self.batches(step), self._settings
        return {
            "epoch": (step + 1) * settings.batch_size / len(self._samples),
            "num_samples": sum(len(batch.samples.lengths) for batch in batches),
            "num_tokens": sum(batch.samples.num_tokens for batch in batches),
        }

    def data_state(self, step: int) -> dict[str, Any]:
        """Return the position after `step` optimizer steps, as JSON."""
        return {**self._order, "step": step}

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of optimizer step `step`, from 0."""
        self._report({"event": "step", "step": step + 1, "policy_version": step + 1, **metrics})

    def report_saved(self, step: int, path: str) -> None:
        """Report a checkpoint."""
        self._report({"event": "checkpoint", "step": step, "path": str(Path(path))})

    def _items_of(self, step: int) -> list[tuple[str, int]]:
        done, interval = step + 1, self._settings.save_interval
        is_saved = done == self.num_steps or (interval is not None and done % interval == 0)
        return [("train", step), *([("save", done)] if is_saved else [])]

    def replace_samples(self, samples: Sequence[Sample]) -> None:
        """Take the same samples with further arrays, before the first step."""
        if len(samples) != len(self._samples):
            raise ValueError(f"{len(samples)} samples cannot take the place of {len(self._samples)}")
        self._samples = samples
        self.batches.cache_clear()

    @lru_cache(maxsize=1)  # noqa: B019, one instance a process, and ranks of one process share a step
    def batches(self, step: int) -> list[RaggedBatch]:
        """Return each dp rank's part of optimizer step `step`, from 0."""
        settings = self._settings
        units_per_step = settings.batch_size // settings.unit
        first = step * units_per_step
        samples = [sample for number in range(first, first + units_per_step) for sample in self._draw(number)]
        return batches_of(samples, settings, step=step, is_last=True, learning_rate_progress=step / self.num_steps)

    def _draw(self, number: int) -> Sequence[Sample]:
        """Return unit `number`, counted over all epochs."""
        unit = self._settings.unit
        num_units = len(self._samples) // unit
        if self._mixed is not None:
            start = self._mixed.draw(number)[0] * unit
        else:
            epoch, place = divmod(number, num_units)
            start = _order(self._settings.seed, epoch, num_units)[place] * unit
        return self._samples[start : start + unit]


def evaluation_parts(samples: Sequence[Sample], settings: DatasetSettings) -> list[list[RaggedBatch]]:
    """Return the batches of an evaluation set: parts of one step's size, each with a batch per dp rank; step is 0."""
    size = settings.batch_size
    starts = range(0, len(samples), size)
    return [
        batches_of(samples[start : start + size], settings, step=0, is_last=start == starts[-1]) for start in starts
    ]


def slice_batches(
    samples: Sequence[Sample], settings: DatasetSettings
) -> Iterator[tuple[list[RaggedBatch], list[tuple[int, int]]]]:
    """Yield parts of one step's size, each a batch per dp rank of consecutive samples, with the samples' bounds."""
    alone = replace(settings, dp=1)
    for start in range(0, len(samples), settings.batch_size):
        end = min(start + settings.batch_size, len(samples))
        units, unit = (end - start) // settings.unit, settings.unit
        cuts = [start + units * rank // settings.dp * unit for rank in range(settings.dp + 1)]
        slices = list(pairwise(cuts))
        parts = [batches_of(samples[first:last], alone, step=0, is_last=True)[0] for first, last in slices]
        yield parts, slices


def denominator(samples: Sequence[Sample], settings: DatasetSettings) -> int:
    """Return what the summed loss of these samples is divided by; 0 if the loss counts no token of them."""
    num_tokens = sum(sample.num_loss_tokens for sample in samples)
    return num_tokens if settings.denominator == "tokens" or not num_tokens else len(samples) // settings.unit


def batches_of(
    samples: Sequence[Sample],
    settings: DatasetSettings,
    *,
    step: int,
    is_last: bool,
    learning_rate_progress: float = 0.0,
) -> list[RaggedBatch]:
    """Share samples out to dp ranks and their micro-batches.

    Args:
        samples: of a mini-batch, whole units.
        settings: sizes and denominator.
        step: optimizer step that it belongs to, from 0.
        is_last: the optimizer steps after it.
        learning_rate_progress: see `MiniBatch`.
    Returns: a batch for each dp rank; its loss scale is that of these samples alone.
    """
    count = denominator(samples, settings)
    parts = plan_batches(
        samples,
        num_ranks=settings.dp,
        max_samples=settings.micro_batch_size,
        max_tokens=settings.max_tokens_per_microbatch,
        one_sample_per_row=settings.one_sample_per_row,
        unit=settings.unit,
        shares_prefixes=settings.shares_prefixes,
    )
    return [
        RaggedBatch(
            step=step,
            samples=ragged,
            plan=plan,
            one_sample_per_row=settings.one_sample_per_row,
            is_last=is_last,
            loss_scale=1 / count if count else 0.0,
            learning_rate_progress=learning_rate_progress,
        )
        for ragged, plan in parts
    ]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def fingerprint(samples: Sequence[Sample]) -> str:
    """Return the xxh3-128 digest of all tokens and masks, and of arrays that not all samples have, such as labels."""
    if isinstance(samples, StreamedSamples):
        return samples.fingerprint
    digest = SampleDigest()
    for sample in samples:
        digest.add(sample)
    return digest.text
