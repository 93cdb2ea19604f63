"""Ask the ranks of a trainer for gradients, steps, scores and checkpoints."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from coati_rl.algorithms.aggregation import token_weight
from coati_rl.batching.dataset_source import DatasetSettings, batches_of, denominator, slice_batches
from coati_rl.batching.sample_selection import SampleSelection
from coati_rl.checkpoint.directory import load_state
from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.coordinator.settings import selection_settings
from coati_rl.errors import ConfigError
from coati_rl.members import Members
from coati_rl.plugins import is_plugin
from coati_rl.protocols import Role
from coati_rl.samples import CUT_OFF, PENALIZED, RaggedBatch, Sample
from coati_rl.types import Device
from consumer.offload_client import PARTS, OffloadClient

_OF_ADAMW = {"adam_betas", "adam_eps", "weight_decay"}
MAX_PROBE_TOKENS = 256  # of the sample whose log-probabilities verify weights that were sent


class TrainerClient(OffloadClient):
    """Share samples out to ranks, each a `TrainerRank` with its models."""

    after_meta = "trainer.load(directory)"
    reads_rollout_logprobs = True  # in its loss; of one's own nothing is known

    def __init__(self, config: TrainingConfig, tokenizer: Any, members: Members, device: Device) -> None:
        """Use ranks that have built the models of these settings, on this kind of device."""
        super().__init__(members)
        self.tokenizer, self.device = tokenizer, device
        self.step = 0  # optimizer steps taken
        self.probe: list[int] = []  # tokens of a sample that was trained last
        self.config = config
        self._sizes = self._batch_settings()
        self._sample_arrays = self.each("sample_arrays")[0]
        self._newest_version: int | None = None  # of the policy that sampled what was trained; None: nothing was
        self._begin_step()

    def _begin_step(self) -> None:
        config = self.config
        self._denominator = 0  # of the mean loss since the last step
        self._has_failed = False  # a call that adds to the step's gradient, or takes it
        settings = selection_settings(config) if isinstance(config, Config) else None
        self._selection = SampleSelection(settings, step=self.step)

    @property
    def offline_config(self) -> OfflineConfig:
        """Return the settings of a loss on a dataset. Raises: ConfigError for another loss."""
        if not isinstance(self.config, OfflineConfig):
            raise ConfigError("this trainer's loss has no format of rows: make samples of completions or token ids")
        return self.config

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Add the gradient of these samples to the step's. After an error of a rank the step begins anew, without any.

        Returns: the loss's metrics, means over these samples; none where the loss needs all of the step's first.
        Raises: RunError if a sample is too long for --max-tokens-per-microbatch; ConfigError if the loss would compare
            log-probabilities of two distributions, or a sample lacks an array that it reads, or that another one holds.
        """
        self.need("weights")
        self._drop_failed()
        self._check_distribution(samples)
        is_alone = self._sizes.unit == 1  # else the loss compares it with others, which stay
        samples = [self._weighed(sample) for sample in samples if sample.num_loss_tokens or not is_alone]
        if not samples:
            return {}
        self._check_arrays(samples)
        self.probe = [*map(int, (*samples[0].prefix_ids, *samples[0].token_ids))][:MAX_PROBE_TOKENS]
        self._keep_old_policy(samples)
        parts = self._selection.split(samples, fraction=1.0)  # with a gradient, and for the metrics alone
        trained, measured = (batches_of(part, self._sizes, step=self.step, is_last=False) for part in parts)
        count = denominator(samples, self._sizes)
        self._denominator += count
        batches = [
            replace(
                own,
                measured_samples=other.samples,
                measured_plan=other.plan,
                loss_scale=1 / count if count else 0.0,
            )
            for own, other in zip(trained, measured, strict=True)
        ]
        with self._noting_failure():
            return self._by_head(self.members.call("forward_backward", self._shares(batches)))

    def optim_step(self, lr: float | None = None, *, loss_scale: float | None = None, **changes: Any) -> dict[str, Any]:
        """Take an optimizer step on the gradient so far, which becomes that of the mean loss.

        Args:
            lr: learning rate; None: the flag's.
            loss_scale: factor from the summed loss to the one that is optimised; None: as in a run.
            changes: of this step: adam_betas, adam_eps, weight_decay, max_grad_norm (infinity: no clipping).
        Returns: grad_norm, learning_rate, and the loss's metrics over all samples of the step.
        Raises: ConfigError for another change, and for a number that is out of range; EngineError if the gradient is
            not finite: no step is taken then, and the next one begins without these samples.
        """
        self.need(*PARTS)
        self._drop_failed()
        mean = 1 / self._denominator if self._denominator else 0.0
        scale = mean if loss_scale is None else loss_scale
        rate = self.config.optimizer.learning_rate if lr is None else lr
        changes = self._checked(changes, lr=rate, loss_scale=scale)
        with self._noting_failure():
            metrics = self._by_head(self.each("optim_step", self.step, scale, rate, changes))
        self.step += 1
        self._begin_step()
        return metrics

    def score(self, samples: Sequence[Sample], model: Role = "policy") -> list[np.ndarray]:
        """Return the log-probabilities of each sample's loss tokens, float32[N] in nats, in the order of the samples.

        Args:
            samples: at the temperature of each.
            model: "policy", or another that the loss has, such as "reference".
        """
        self.need("weights")
        weighed = [self._weighed(sample) for sample in samples]
        settings = replace(self._sizes, batch_size=max(len(weighed), 1))
        scores = list[np.ndarray]()
        for batches, _ in slice_batches(weighed, settings):
            found = self.members.call("score", [(*share, model) for share in self._shares(batches)])
            by_dp_rank = {self._dp_rank(rank): each for rank, each in enumerate(found) if each is not None}
            scores += [np.asarray(each) for _, part in sorted(by_dp_rank.items()) for each in part]
        return scores

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face checkpoint with the optimizer's state; it appears complete or not at all."""
        self.need(*PARTS)
        self.each("save", Path(directory).absolute(), self.step)

    def load(self, directory: str | Path) -> None:
        """Go on from a checkpoint of any layout, with its weights, optimizer, random state and step."""
        self.each("load", Path(directory).absolute())
        self._absent = {}
        self._newest_version = None
        self.step = int(load_state(Path(directory))["step"])
        self._begin_step()

    def live_weights(self) -> dict[str, Tensor]:
        """Return the weights of the only rank, not copied. Raises: RunError if they are not on the device."""
        self.need("weights")
        weights: dict[str, Tensor] = self.each("live_weights")[0]
        return weights

    def _keep_old_policy(self, samples: Sequence[Sample]) -> None:
        """Copy the policy that old_logprobs are of before the first samples of newer weights; all ranks at this call.

        Samples without `policy_version` are of no newer weights than others.
        """
        newest = max(int(np.max(sample.arrays.get("policy_version", -1), initial=-1)) for sample in samples)
        if self._newest_version is None or newest > self._newest_version:
            self.each("keep_old_policy")
            self._newest_version = newest

    def _drop_failed(self) -> None:
        """Begin the step anew after a call that failed: ranks may hold a part of its gradient, and some none.

        Not at the failure: others may then wait for the rank that failed, until their collective's time limit.
        """
        if self._has_failed:
            self.each("drop_step")
            self._begin_step()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    def _checked(self, changes: dict[str, Any], **numbers: float) -> dict[str, Any]:
        """Return the changes of a step as its settings have them. Raises: ConfigError, also for wrong `numbers`."""
        known = {"max_grad_norm"} | (set() if is_plugin(self.config.optimizer.optimizer) else _OF_ADAMW)
        if unknown := changes.keys() - known:
            raise ConfigError(f"optim_step({min(unknown)}=...): a step has {', '.join(sorted(known))}")
        for name, number in numbers.items():
            if not 0 <= number < math.inf:  # False for NaN, too
                raise ConfigError(f"optim_step({name}={number!r}): give a finite number of at least 0")
        unclipped = {"max_grad_norm": math.inf} if changes.get("max_grad_norm") == math.inf else {}
        try:
            settings = OptimizerConfig(**{name: value for name, value in changes.items() if name not in unclipped})
        except ValidationError as error:
            problem = error.errors()[0]
            wrong, why = str(problem["loc"][0]), problem["msg"].removeprefix("Value error, ")
            raise ConfigError(f"optim_step({wrong}={changes[wrong]!r}): {why}") from error
        return {name: getattr(settings, name) for name in changes} | unclipped

    def _dp_rank(self, rank: int) -> int:
        return rank * self.config.dp // self.members.size

    def _shares(self, batches: Sequence[RaggedBatch]) -> list[tuple[RaggedBatch]]:
        return [(batches[self._dp_rank(rank)],) for rank in range(self.members.size)]

    @staticmethod
    def _by_head(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the metrics of the rank that has computed most of them: one with the LM head."""
        return max(results, key=len)

    def _batch_settings(self) -> DatasetSettings:
        config, unit = self.config, int(self.each("unit")[0])
        by_tokens = isinstance(config, Config) and config.algorithm.loss_variation == "token_level"
        return DatasetSettings(
            dp=config.dp,
            trainers_per_dp_rank=self.members.size // config.dp,
            batch_size=unit,
            micro_batch_size=config.parallel.train_microbatch_size * unit,
            max_tokens_per_microbatch=config.parallel.max_tokens_per_microbatch,
            one_sample_per_row=config.parallel.one_sample_per_row,
            shares_prefixes=config.shares_prefixes,
            unit=unit,
            denominator="tokens" if by_tokens or (isinstance(config, OfflineConfig) and unit == 1) else "units",
        )

    def _check_distribution(self, samples: Sequence[Sample]) -> None:
        if not isinstance(self.config, Config) or not self.reads_rollout_logprobs:
            return
        if any(PENALIZED in sample.arrays for sample in samples):
            raise ConfigError("samples of generate(repetition_penalty=...) are not of the policy; sample without it")
        if not self.config.recomputes_old_logprobs and any(CUT_OFF in sample.arrays for sample in samples):
            raise ConfigError(
                "samples of generate(top_p=..., top_k=..., min_p=...) have log-probabilities over the tokens that were "
                'left, the trainer\'s are over all; use Trainer(old_logprobs="trainer"), or sample without them'
            )

    def _check_arrays(self, samples: Sequence[Sample]) -> None:
        names = {name: "another sample holds" for sample in samples for name in sample.arrays}
        names |= dict.fromkeys(self._sample_arrays, "the loss reads")
        for sample in samples:
            if missing := [name for name in names if name not in sample.arrays]:
                raise ConfigError(
                    f"{sample.uid}, sample {sample.number}: has no array {missing[0]!r}, which {names[missing[0]]}; "
                    "coati.group_samples and coati.rows give samples all that a loss needs, Sample(arrays=...) another"
                )

    def _weighed(self, sample: Sample) -> Sample:
        """Give a sample's tokens the weights of the loss's aggregation, unless it has its own."""
        weight = 1.0
        if isinstance(self.config, Config) and sample.num_loss_tokens:
            longest, variation = self.config.max_response_tokens, self.config.algorithm.loss_variation
            weight = token_weight(sample.num_loss_tokens, variation, max_length=longest)
        arrays = {name: array for name, array in sample.arrays.items() if name not in (CUT_OFF, PENALIZED)}
        return replace(sample, arrays={"temperature": 1.0, "loss_weights": weight, **arrays})
