"""Make the micro-batches of a step again: of rollouts by the coordinator's own rules, of a dataset by its order.

Each row holds one sample: no packing, no sharing, no ranks. The loss and its gradient do not depend on those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coati_rl.batching.batcher import BatchSettings, ClosedStep, StepBatcher
from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.batching.packing import build_mini_batch
from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.errors import ConfigError
from coati_rl.estimator import load_estimator
from coati_rl.preflight.offline_rows import TRAIN_FLAG, load_forms, make_samples, needs_chat_template
from coati_rl.preflight.prepare_offline import dataset_settings
from coati_rl.preflight.resources import load_run_tokenizer
from coati_rl.replay.training import StepBatch
from coati_rl.samples import RaggedBatch
from coati_rl.types import RolloutGroup


class RolloutBatches:
    """Make the steps of a run with producers of its recorded groups."""

    def __init__(self, config: Config, precision: torch.dtype) -> None:
        """Take the rules of the run."""
        self._config = config
        settings = coordinator_settings(config, precision="bf16" if precision == torch.bfloat16 else "fp32")
        self._settings = _unpacked(settings.batch)
        self._estimator = load_estimator(settings.batch.advantage_estimator)

    def of_groups(self, step: int, groups: Sequence[RolloutGroup]) -> tuple[StepBatch, ClosedStep]:
        """Return a step's content and its advantages.

        Args:
            step: optimizer steps before it.
            groups: recorded for it; those that were dropped before it come last.
        Raises: ConfigError if there are too few.
        """
        size, number = self._settings.prompts_per_mini_batch, self._settings.prompts_per_step
        if len(groups) < number:
            raise ConfigError(f"step {step + 1}: {len(groups)} prompts are recorded, and it trains {number}")
        batcher = StepBatcher(self._settings, step=step, learning_rate_progress=0.0, estimator=self._estimator)
        batches = [batch for at in range(0, number, size) for batch in batcher.add(groups[at : at + size])]
        return _step_batch(step, batches), batcher.close()


class DatasetBatches:
    """Make the steps of a job on a dataset of its rows."""

    def __init__(self, config: OfflineConfig) -> None:
        """Read, render and tokenise the rows. Raises: ConfigError."""
        forms = load_forms(config, str(config.data.dataset), flag=TRAIN_FLAG)
        self.tokenizer: Any = load_run_tokenizer(
            Path(config.model.model), config.data, needs_chat_template=needs_chat_template(forms)
        )
        made = make_samples(config, forms, self.tokenizer, flag=TRAIN_FLAG)
        settings = dataset_settings(config, made.mixing)
        self._source = DatasetSource(
            made.samples,
            replace(
                settings,
                dp=1,
                trainers_per_dp_rank=1,
                micro_batch_size=settings.unit,
                max_tokens_per_microbatch=None,
                one_sample_per_row=True,
                shares_prefixes=False,
            ),
        )

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the whole job."""
        return self._source.num_steps

    def of_step(self, step: int) -> StepBatch:
        """Return a step's content. `step`: optimizer steps before it."""
        return _step_batch(step, self._source.batches(step))

    def statistics(self, step: int) -> Mapping[str, Any]:
        """Return what the step's record has of its data."""
        return self._source.statistics(step)

    def data_state(self, step: int) -> Mapping[str, Any]:
        """Return what a checkpoint has of the data."""
        return self._source.data_state(step)


def _unpacked(settings: BatchSettings) -> BatchSettings:
    """Return the settings of one process that computes each sample by itself."""
    return replace(
        settings,
        dp=1,
        train_batch_size=settings.prompts_per_step,
        train_minibatch_size=settings.prompts_per_mini_batch,
        train_microbatch_size=1,
        max_tokens_per_microbatch=None,
        one_sample_per_row=True,
        shares_prefixes=False,
        num_stages=1,
    )


def _step_batch(step: int, batches: Sequence[RaggedBatch]) -> StepBatch:
    micro_batches = tuple(each for batch in batches for each in build_mini_batch(batch).micro_batches)
    return StepBatch(step=step, micro_batches=micro_batches, loss_scale=batches[-1].loss_scale)
