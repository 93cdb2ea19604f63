"""Read the rows of a job on a dataset and make its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_plan import RowCounts
from coati_rl.data.conversations import make_conversations
from coati_rl.data.dataset import load_rows, messages_of
from coati_rl.data.tasks import RowTasks, Task
from coati_rl.samples import Sample
from coati_rl.types import DEFAULT_TASK

_ROWS = RowTasks(tasks={DEFAULT_TASK: Task(truth=None)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSet:
    """Hold the samples of a file, and the sizes of its rows."""

    samples: tuple[Sample, ...]
    counts: RowCounts


def load_forms(config: OfflineConfig, path: str, *, flag: str) -> list[Any]:
    """Read and check the rows of a file. Raises: ConfigError naming the row."""
    return [messages_of(row.fields) for row in load_rows(path, flag=flag, tasks=_ROWS)]


def make_samples(config: OfflineConfig, forms: Sequence[Any], tokenizer: Any, *, flag: str) -> SampleSet:
    """Render and tokenise rows. Raises: ConfigError naming the row."""
    made = make_conversations(forms, tokenizer, max_tokens=config.data.max_length, flag=flag)
    counts = RowCounts(
        num_rows=len(forms),
        num_left_out=made.num_refused,
        num_cut=0,
        num_tokens=sum(len(sample) for sample in made.samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in made.samples),
    )
    return SampleSet(samples=made.samples, counts=counts)
