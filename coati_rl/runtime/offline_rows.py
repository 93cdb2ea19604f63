"""Read the rows of a job on a dataset, and make the samples that the job trains on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_jobs import PrmJobConfig, SftJobConfig
from coati_rl.config.offline_plan import RowCounts
from coati_rl.data.files import read_rows
from coati_rl.data.forms import Conversation, Form, OfflineJob
from coati_rl.data.offline_samples import OfflineSamples, kto_samples, pair_samples, sft_samples
from coati_rl.data.reward_samples import prm_samples, rm_samples
from coati_rl.data.row_formats import FormSet, read_forms
from coati_rl.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSet:
    """Hold the samples of a set of rows, and the sizes of the rows."""

    samples: tuple[Sample, ...]
    counts: RowCounts


def load_forms(config: OfflineConfig, path: str, *, flag: str) -> FormSet:
    """Read and check the rows of a file. Raises: ConfigError naming the row."""
    return read_forms(read_rows(path, flag=flag), cast(OfflineJob, config.JOB))


def needs_chat_template(forms: Sequence[Form]) -> bool:
    """Return True if a row holds messages, which a chat template renders."""
    return any(isinstance(form, Conversation) or isinstance(getattr(form, "prompt", None), tuple) for form in forms)


def make_samples(config: OfflineConfig, rows: FormSet, tokenizer: Any) -> SampleSet:
    """Render and tokenise rows. Raises: ConfigError naming the row."""
    made = _samples(config, rows.forms, tokenizer)
    counts = RowCounts(
        num_rows=len(made.rows),
        num_equal=rows.num_equal,
        num_left_out=made.num_left_out,
        num_cut=made.num_cut,
        num_tokens=sum(len(sample) for sample in made.samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in made.samples),
    )
    return SampleSet(samples=made.samples, counts=counts)


def _samples(config: OfflineConfig, forms: Sequence[Form], tokenizer: Any) -> OfflineSamples:
    length = config.data.max_length
    if isinstance(config, SftJobConfig):
        return sft_samples(forms, tokenizer, max_length=length, loss_on=config.objective.loss_on)
    if isinstance(config, PrmJobConfig):
        return prm_samples(forms, tokenizer, max_length=length, placeholder=config.objective.placeholder_token)
    make = {"rm": rm_samples, "dpo": pair_samples, "kto": kto_samples}[config.JOB]
    return make(forms, tokenizer, max_length=length)
