"""Replay a step: yield each stage as soon as it is known, from the data's rows to the weights after the step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.checkpoint.directory import load_state, read_state, role_directory
from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.preflight.prompts import load_run_rows, make_run_prompts, make_source
from coati_rl.preflight.resources import load_run_tokenizer
from coati_rl.replay.batches import DatasetBatches, RolloutBatches
from coati_rl.replay.gradient_stage import (
    check_gradients,
    check_metrics,
    check_update,
    recorded_gradients,
    tolerance_of,
)
from coati_rl.replay.parts import Parts, ReplayModel
from coati_rl.replay.recorded_groups import check_detail, groups_of
from coati_rl.replay.rollout_stages import (
    check_advantages,
    check_prompts,
    check_records,
    check_rewards,
    check_rollout_logprobs,
    check_texts,
    prompts_or_error,
)
from coati_rl.replay.run_config import config_of, precision_of
from coati_rl.replay.stage import ReplayStage, checked, unchecked
from coati_rl.replay.start import Retraining, Start, nearest, starts_of
from coati_rl.replay.token_ratios import Content, ratios_of, write_ratios
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.text import count


class Replay:
    """Replay steps of one run; nothing is written but by `write_ratios`."""

    def __init__(self, run: RunDirectory, parts: Parts, *, with_ratios: bool = False) -> None:
        """Read the run's configuration and records. Raises: ConfigError.

        `with_ratios`: compute what `write_ratios` writes, with the stages.
        """
        self.run = run
        self._parts = parts
        self.records: Mapping[int, Mapping[str, Any]] = {record["step"]: record for record in run.steps()}
        self._with_ratios = with_ratios
        self._ratios: dict[Content, np.ndarray] = {}
        self._take_settings(max(self.records, default=1))

    def stages(self, step: int, uid: str | None = None) -> Iterator[ReplayStage]:
        """Yield the stages of an optimizer step, from 1.

        Args:
            step: optimizer step.
            uid: check the stages of this prompt's rollouts alone, and no stage of the whole step; None: all.
        Raises: ConfigError if the step, or the prompt, is not recorded.
        """
        if step not in self.records:
            raise ConfigError(f"--step {step}: {self.run.path / 'metrics.jsonl'} has no such step")
        self._take_settings(step)
        if isinstance(self.config, Config):
            yield from self._rollout_stages(self.config, step, uid)
        elif uid is None:
            yield from self._dataset_stages(step)
        else:
            raise ConfigError("--sample: a job on a dataset has no rollouts; leave it out")

    def _take_settings(self, step: int) -> None:
        """Take the settings that a step was trained with: a run that is resumed since may have others."""
        self.config: TrainingConfig = config_of(self.run, step)
        if self.config.setting("aux_loss_coeff", 0.0):
            raise ConfigError(f"{self.run.path}: steps with --aux-loss-coeff cannot be replayed yet")
        self.precision = precision_of(self.run, self.config)
        self.starts = starts_of(self.run, self.config)

    def write_ratios(self, step: int) -> Path:
        """Write the ratios of the tokens of a step whose stages have been computed. Returns: the file.

        Raises: ConfigError if it has none; RunError if they cannot be written.
        """
        if not self._ratios:
            raise ConfigError(f"--ratios: step {step} has no loss of rollouts that could be computed")
        return write_ratios(self.run.path, step, self.run.rollouts(self._first_update(step - 1) + 1), self._ratios)

    def _rollout_stages(self, config: Config, step: int, uid: str | None) -> Iterator[ReplayStage]:
        first = self._first_update(step - 1)
        recorded = [*self.run.rollouts(first + 1)]
        rollouts = [each for each in recorded if uid in (None, each.uid)]
        if not rollouts:
            which = "" if uid is None else f" of prompt {uid}"
            raise ConfigError(f"--step {step}: no rollout{which} is recorded; see --rollout-detail")
        check_detail(recorded)
        of_records = check_records(rollouts, {} if uid else self.records[first + 1])
        yield of_records
        if of_records.verdict == "differs":
            return  # there may be no groups to be made of these lines
        groups = groups_of(recorded)
        needs_template = config.data.input_template is None
        tokenizer = load_run_tokenizer(Path(config.model.model), config.data, needs_chat_template=needs_template)
        prompts = prompts_or_error(self._prompt_finder(config, tokenizer), rollouts)
        yield check_prompts(rollouts, prompts)
        yield check_texts(rollouts, tokenizer, config.sampling.stop)
        with closing(self._parts.open_scorer(config)) as scorer:
            yield check_rewards(rollouts, prompts, config, scorer)
        own = RolloutBatches(config, self.precision)
        _, closed = own.of_groups(first, groups)
        if any(group.baseline is not None for group in groups) and config.over_length_cache is not None:
            yield unchecked("advantage", "the length of the greedy answers, which is punished, is not recorded")
        else:
            yield check_advantages(rollouts, closed)
        retraining = self._retraining(
            step - 1, lambda at: own.of_groups(at, groups_of([*self.run.rollouts(at + 1)]))[0]
        )
        yield self._check_weights(step - 1, rollouts)
        retraining.advance(step - 1, self._learning_rate)
        versions = {version for group in groups for version in group.policy_versions.tolist()}
        models = self._policies(versions, retraining)
        yield check_rollout_logprobs(
            [each for each in groups if uid in (None, each.prompt.uid)], models, config, self.precision
        )
        if uid is None:
            yield from self._training_stages(step, retraining)

    def _dataset_stages(self, step: int) -> Iterator[ReplayStage]:
        config = self.config
        if not isinstance(config, OfflineConfig):
            raise ConfigError(f"{self.run.path}: is of no job that can be replayed")
        batches = DatasetBatches(config)
        record, found = self.records[step], batches.statistics(step - 1)
        problem = next(
            (
                f"{name}: recorded {record[name]}, of the rows {found[name]}"
                for name in found
                if record[name] != found[name]
            ),
            None,
        )
        yield checked(
            "rows", problem, f"{count(found['num_samples'], 'sample')}, {count(found['num_tokens'], 'token')}"
        )
        yield self._check_rows(batches)
        retraining = self._retraining(step - 1, batches.of_step)
        yield self._check_weights(step - 1, ())
        yield from self._training_stages(step, retraining)

    def _training_stages(self, step: int, retraining: Retraining) -> Iterator[ReplayStage]:
        record, training = self.records[step], retraining.training
        tolerance = tolerance_of(self.precision, is_retrained=retraining.first_step < step - 1)
        retraining.advance(step - 1, self._learning_rate)
        batch, sums = retraining.batch()
        result = training.result_of(batch, sums)
        self._ratios = ratios_of(training, batch) if self._with_ratios and isinstance(self.config, Config) else {}
        yield from check_metrics(result, record, tolerance)
        yield from check_gradients(
            training,
            batch,
            result,
            record=record,
            recorded=recorded_gradients(self.run.path, step),
            tolerance=tolerance,
        )
        after = next((each for each in self.starts if each.step == step), None)
        if after is None:
            yield unchecked("update", f"there is no checkpoint of step {step}")
            return
        if not retraining.can_train:
            yield unchecked("update", "the weights before the step were kept without the optimizer's state")
            return
        if tolerance.update is None:
            yield unchecked("update", "Adam makes steps of the rounding errors of a bfloat16 gradient, too")
            return
        before = training.masters()
        training.update(batch, result, self._learning_rate(step))
        saved = after.directory
        directories = {role: saved if role == "policy" else role_directory(saved, role) for role in before}
        yield check_update(before, training.masters(), directories, tolerance.update)

    def _retraining(self, step: int, batch_of: Any) -> Retraining:
        """Return the models at the newest weights from before a step. `step`: optimizer steps taken."""
        config, sync_period = self.config, 1
        if isinstance(config, Config):
            sync_period = config.sync_period
            correction = self.records[step + 1].get("correction_mean")
            config = config if correction is None else config.with_gap_correction()
        start, old = self._start(step), self._old_policy(step)
        retraining = Retraining(
            self._parts,
            config,
            start,
            self.precision,
            batch_of=batch_of,
            first_of=self._first_update,
            old_period=sync_period,
        )
        if not start.can_train and old is not None and old.step != step:
            retraining.training.load_old_policy(old.directory)
        return retraining

    def _start(self, step: int) -> Start:
        """Return the weights that the replay of the step after `step` begins with.

        Kept weights do where the step needs no others: no first update on its batch, and no older policy that is gone.
        """
        takes_kept = self._first_update(step) == step and self._old_policy(step) is not None
        return nearest(self.starts, step, takes_kept=takes_kept)

    def _old_policy(self, step: int) -> Start | None:
        """Return the weights that engines had at a step by the schedule of syncs; None: they are not on the disk."""
        period = self.config.sync_period if isinstance(self.config, Config) else 1
        return next((each for each in self.starts if each.step == step - step % period), None)

    def _first_update(self, step: int) -> int:
        """Return the optimizer steps taken at the first update on the batch of a step; see --updates-per-batch."""
        config = self.config
        if not isinstance(config, Config) or not self.records[step + 1].get("update"):
            return step
        begin = step // config.sync_period * config.sync_period
        num_batches = sum(
            not self.records[at + 1].get("update", 0)
            for at in range(begin, begin + config.sync_period)
            if at + 1 in self.records
        )
        return begin + (step - begin) % num_batches

    def _check_weights(self, step: int, rollouts: Sequence[RecordedRollout]) -> ReplayStage:
        """Check the files of the weights that a step begins with, and their identity, if engines named it."""
        start = self._start(step)
        if not start.is_initial:
            try:
                read_state(start.directory)
            except ConfigError as error:
                return checked("weights", str(error).removeprefix("--checkpoint-path "), "")
        if (problem := self._identity_problem(rollouts)) is not None:
            return checked("weights", problem, "")
        retrained = step - start.step
        trained = f"{count(retrained, 'step')} after it trained again" if retrained else "as they are on the disk"
        return checked("weights", None, f"{start.directory.name}, {trained}")

    def _identity_problem(self, rollouts: Sequence[RecordedRollout]) -> str | None:
        """Return which version engines had under another identity than the trainers sent; None if there is none."""
        sent = {sync.get("policy_version", sync["step"]): sync.get("identity") for sync in self.run.syncs()}
        for each in rollouts:
            for version, identity in zip(each.policy_versions, each.line.get("weights", ()), strict=False):
                expected = sent.get(version)
                if expected and identity and expected != identity:
                    had, was = f"engines had {identity[:16]}", f"the trainers sent {expected[:16]}"
                    return f"{each.uid} sample {each.sample}: of version {version} {had}, and {was}"
        return None

    def _policies(self, versions: set[int], retraining: Retraining) -> dict[int, ReplayModel]:
        """Return the policies of these versions, as far as their weights are on the disk or have been trained again."""
        found = {retraining.step: retraining.training.models["policy"]}
        for start in self.starts:
            if start.step in versions - {*found}:
                found[start.step] = self._parts.load_models(self.config, start.directory, self.precision)["policy"]
        return {version: model for version, model in found.items() if version in versions}

    def _check_rows(self, batches: DatasetBatches) -> ReplayStage:
        """Compare the tokens of all rows with what checkpoints have of them."""
        for start in self.starts:
            if start.is_initial or not start.can_train:
                continue
            recorded: dict[str, Any] = load_state(start.directory).get("data") or {}
            found = batches.data_state(start.step)
            differ = [name for name in found if recorded.get(name) != found[name]]
            text = f"{', '.join(differ)} of the rows' tokens differ from what {start.directory.name} was trained on"
            return checked("tokens", text if differ else None, "the rows' tokens are those that were trained")
        return unchecked("tokens", "no checkpoint names the tokens that were trained")

    def _learning_rate(self, step: int) -> float:
        return float(self.records[step]["learning_rate"])

    def _prompt_finder(self, config: Config, tokenizer: Any) -> Any:
        """Return the function from a uid to its prompt, of the dataset's rows as they are now."""
        environment = self._parts.environment(config)
        rows = load_run_rows(config, self._parts.rewards, tools=environment.tools)
        environment.check_tokenizer(tokenizer)
        train, _ = make_run_prompts(rows, config, tokenizer)
        return make_source(rows, config, tokenizer, train).find
