"""Read the rows of a job on a dataset, and make the samples that the job trains on."""

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from coati_rl.config.named_paths import read_sources
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_plan import RowCounts
from coati_rl.errors import ConfigError
from coati_rl.reading.files import LocatedRow, each_row
from coati_rl.reading.forms import Conversation, Form, Labelled, Pair, Recorded
from coati_rl.reading.mixing import Mixing
from coati_rl.reading.offline_samples import OfflineSamples, pair_samples
from coati_rl.reading.row_formats import Columns, FormSet
from coati_rl.reading.streamed_rows import StreamedRows
from coati_rl.reading.streamed_samples import StreamedSamples, streamed_forms
from coati_rl.samples import Sample

TRAIN_FLAG = "--dataset"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSet:
    """Hold the samples of a set of rows, and the sizes of the rows."""

    samples: Sequence[Sample]
    counts: RowCounts
    mixing: Mixing | None = None  # of training rows whose sources have shares


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForms:
    """Hold the forms of all sources of a flag, source by source."""

    forms: Sequence[Form]
    sizes: tuple[int, ...]  # forms of each source
    num_equal: int = 0  # pairs left out because chosen and rejected are equal
    num_undecided: int = 0  # rollouts left out because their reward is undecided
    streamed: tuple[StreamedRows[Form], ...] = ()  # each source in place of `forms`


def load_forms(config: OfflineConfig, text: str, *, flag: str) -> SourceForms:
    """Read and check the rows of the sources that a flag lists. Raises: ConfigError naming the row."""
    data = config.data
    columns = Columns(
        **data.columns, input_template=data.input_template, step_token=config.setting("placeholder_token", None)
    )
    limit = data.max_samples if flag == TRAIN_FLAG else None
    if config.setting("streaming", False) and flag == TRAIN_FLAG:
        streamed = tuple(
            streamed_forms(source.path, flag=flag, columns=columns, max_rows=limit) for source in read_sources(text)
        )
        return SourceForms(forms=(), sizes=tuple(map(len, streamed)), streamed=streamed)
    sources = [each_row(source.path, flag=flag, max_rows=limit) for source in read_sources(text)]
    return read_source_forms(config, sources, columns)


def read_source_forms(
    config: OfflineConfig, sources: Iterable[Iterable[LocatedRow]], columns: Columns | None = None
) -> SourceForms:
    """Read the rows of each source into the job's forms. Raises: ConfigError naming the row."""
    read: Callable[..., FormSet] = pkgutil.resolve_name(config.FORMS)
    sets = [read(rows, config.JOB, columns) for rows in sources]
    return SourceForms(
        forms=tuple(form for each in sets for form in each.forms),
        sizes=tuple(len(each.forms) for each in sets),
        num_equal=sum(each.num_equal for each in sets),
        num_undecided=sum(each.num_undecided for each in sets),
    )


def needs_chat_template(rows: SourceForms) -> bool:
    """Return True if a row holds messages, which a chat template renders."""
    forms = rows.forms
    return any(Conversation in source.kinds for source in rows.streamed) or any(
        isinstance(form, Conversation) or isinstance(getattr(form, "prompt", None), tuple) for form in forms
    )


def make_samples(config: OfflineConfig, rows: SourceForms, tokenizer: Any, *, flag: str) -> SampleSet:
    """Render and tokenise the rows of a flag. Raises: ConfigError naming the row."""
    if rows.streamed:
        return _streamed(config, rows, tokenizer)
    made = _sampler(config, tokenizer)(rows.forms)
    counts = RowCounts(
        num_rows=len(made.rows),
        num_equal=rows.num_equal,
        num_undecided=rows.num_undecided,
        num_left_out=made.num_left_out,
        num_cut=made.num_cut,
        num_tokens=sum(len(sample) for sample in made.samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in made.samples),
    )
    mixing = _mixing(config, made.sizes(rows.sizes)) if flag == TRAIN_FLAG and made.samples else None
    return SampleSet(samples=made.samples, counts=counts, mixing=mixing)


def _streamed(config: OfflineConfig, rows: SourceForms, tokenizer: Any) -> SampleSet:
    samples = StreamedSamples(rows.streamed, _sampler(config, tokenizer))
    counts = RowCounts(
        num_rows=len(samples),
        num_equal=0,
        num_left_out=samples.num_unusable,
        num_cut=samples.num_cut,
        num_tokens=samples.num_tokens,
        num_loss_tokens=samples.num_loss_tokens,
    )
    mixing = _mixing(config, samples.sizes) if len(samples) else None
    return SampleSet(samples=samples, counts=counts, mixing=mixing)


def _sampler(config: OfflineConfig, tokenizer: Any) -> Callable[..., OfflineSamples]:
    """Return the function from forms to the job's samples; picklable."""
    make = pkgutil.resolve_name(config.SAMPLES)
    return partial(make, tokenizer=tokenizer, max_length=config.data.max_length, **config.sample_options)


def tokens_of(config: OfflineConfig, form: Form, tokenizer: Any) -> list[np.ndarray]:
    """Return the tokens and loss masks of a row's own samples. Raises: ConfigError naming the row."""
    if isinstance(form, Recorded):
        return [form.token_ids]  # no tokenizer makes them
    if isinstance(form, Labelled):  # whose job compares it with other rows' completions
        form = Pair(prompt=form.prompt, chosen=form.completion, rejected=form.completion, where=form.where)
        made = pair_samples([form], tokenizer, max_length=config.data.max_length)
    else:
        made = _sampler(config, tokenizer)([form])
    arrays = [(np.append(each.prefix_ids, each.token_ids), each.loss_mask) for each in made.samples]
    return [array for pair in arrays for array in pair]


def _mixing(config: OfflineConfig, sizes: tuple[int, ...]) -> Mixing | None:
    shares = config.data.shares
    if shares and 0 in sizes:
        raise ConfigError(
            f"{TRAIN_FLAG} {config.data.sources[sizes.index(0)].path}: none of its rows has anything to train within "
            f"--max-length {config.data.max_length}, so that it cannot have a share; raise it, or leave the source out"
        )
    return Mixing(sizes=sizes, shares=shares) if shares else None
