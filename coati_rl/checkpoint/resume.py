"""Open the checkpoint of -cp, and refuse one that does not fit the configuration before anything starts.

The prompts, their order and the model's shape must be those of the checkpoint. All other settings may change; changes
of those that affect the results, the prompts' ground truths among them, are reported and recorded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.directory import ROLLOUTS_FILE, find_checkpoint, read_state
from coati_rl.checkpoint.ledger_files import LEDGER
from coati_rl.checkpoint.ledger_frames import LedgerError
from coati_rl.checkpoint.ledger_resume import RecoveredRollouts, recover
from coati_rl.checkpoint.position import Position, read_data_state
from coati_rl.checkpoint.resumed_run import ResumedRun, changed_settings, check_shape, date_hint, read_settings
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.config import Config
from coati_rl.config.tasks import TaskConfig
from coati_rl.errors import ConfigError
from coati_rl.reading.draw_order import DrawOrder
from coati_rl.reading.prompt_source import PromptSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint(ResumedRun):
    """Hold a checkpoint of a run with producers that fits the configuration."""

    position: Position
    untrained: UntrainedRollouts = field(default_factory=UntrainedRollouts)
    recovered: RecoveredRollouts | None = None  # finished after the checkpoint, of the run's ledger

    @property
    def step(self) -> int:
        return self.position.step

    def line(self) -> str:
        line = ResumedRun.line(self)
        return line if self.recovered is None or not self.num_recovered else f"{line}, and {self.recovered.line()}"

    @property
    def num_recovered(self) -> int:
        """Return the number of groups that are taken from the ledger."""
        return 0 if self.recovered is None else len(self.recovered.finished)

    def record(self) -> dict[str, Any]:
        return {**ResumedRun.record(self), "groups_of_ledger": self.num_recovered}


def open_resume_point(config: Config, source: PromptSource | None, *, num_prompts: int | None) -> ResumePoint | None:
    """Return the resume point of -cp; None without it.

    Args:
        config: with the model as a directory.
        source: of the run's prompts; None if they are unknown (a dry run without the model's tokenizer).
        num_prompts: usable prompts of the dataset; None: endless.
    Raises: ConfigError.
    """
    if config.run.checkpoint_path is None:
        return None
    directory = find_checkpoint(Path(config.run.checkpoint_path))
    state = read_state(directory)
    if job := state.get("data", {}).get("job"):
        raise ConfigError(
            f"--checkpoint-path {directory}: is a checkpoint of coati-rl {job}; start from its weights with "
            f"--model {directory}"
        )
    try:
        position, order = read_data_state(state.get("data", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--checkpoint-path {directory} is not a checkpoint to resume from: {error}; "
            "start from its weights with --model"
        ) from error
    _check_draw_order(config, source, order, directory)
    if source is not None:
        check_shape(config, directory)
    recovered: RecoveredRollouts | None = None
    changes, untrained = [*_changes(config, directory), *_changed_truths(config, source, order)], UntrainedRollouts()
    if changes and position.kept:
        # The rollouts may have other lengths, rewards or group sizes than this run's.
        changes.append(f"{len(position.kept)} prompts with finished rollouts are therefore sampled again")
        position = replace(position, waiting=(*position.waiting, *position.kept), kept=())
    elif source is not None and not changes:
        untrained = _read_untrained(directory, position, source)
        recovered = _recover(config, directory, position, source)
    return ResumePoint(
        directory=directory,
        position=position,
        num_steps=_num_steps(config, position, num_prompts, directory),
        changes=tuple(changes),
        untrained=untrained,
        recovered=recovered,
    )


def _read_untrained(directory: Path, position: Position, source: PromptSource) -> UntrainedRollouts:
    untrained, path = UntrainedRollouts(), directory / ROLLOUTS_FILE
    try:
        if path.is_file():
            untrained = UntrainedRollouts.from_bytes(path.read_bytes(), source.find)
        if tuple(finished.group.prompt.uid for finished in untrained.finished) != position.kept:
            raise ValueError("its prompts are not those in the state")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checkpoint-path {directory}: {ROLLOUTS_FILE} cannot be used: {error}") from error
    return untrained


def _recover(config: Config, directory: Path, position: Position, source: PromptSource) -> RecoveredRollouts | None:
    """Return what the ledger of the checkpoint's run holds since it, unless this run is to have none."""
    if not config.run.ledger:
        return None
    try:
        return recover(directory.parent.parent / LEDGER, position, source.find, n_behind=config.sync.n_behind)
    except LedgerError as error:
        raise ConfigError(
            f"--checkpoint-path {directory}: its run's ledger cannot be used: {error}; move that directory away to "
            "sample again what was finished after the checkpoint, or add --no-ledger"
        ) from error


def _check_draw_order(config: Config, source: PromptSource | None, order: DrawOrder, directory: Path) -> None:
    if config.run.seed != order.seed:
        raise ConfigError(
            f"--seed {config.run.seed}: the run of --checkpoint-path {directory} draws its prompts in the order of "
            f"seed {order.seed}; use --seed {order.seed}"
        )
    here = order if source is None else source.order
    if (here.num_prompts, here.fingerprint) != (order.num_prompts, order.fingerprint):
        numbers = f"{_number(here)} prompts here, {_number(order)} there"
        raise ConfigError(
            f"--dataset {config.data.dataset_text}: not the prompts of --checkpoint-path {directory} ({numbers})"
            f"{date_hint(config)}, so that its position in the data is not valid; use that run's --dataset, "
            "--system-prompt, --reward-type and --max-prompt-tokens, or start from the weights alone with --model"
        )


def _number(order: DrawOrder) -> str:
    return "endless" if order.num_prompts is None else str(order.num_prompts)


def _num_steps(config: Config, position: Position, num_prompts: int | None, directory: Path) -> int:
    data, num_updates = config.data, config.algorithm.updates_per_batch
    if position.step % num_updates:
        raise ConfigError(
            f"--updates-per-batch {num_updates}: the run of --checkpoint-path {directory} has taken {position.step} "
            "optimizer steps, which is not a multiple of it; use that run's --updates-per-batch, or start from the "
            "weights alone with --model"
        )
    if data.max_steps is not None and position.step >= data.max_steps:
        raise ConfigError(
            f"--max-steps {data.max_steps}: nothing is left to do, --checkpoint-path {directory} is at step "
            f"{position.step} already; --max-steps counts all steps of the run, so raise it"
        )
    if num_prompts is None:
        if data.max_steps is None:
            raise AssertionError("rules.check refuses an endless run without --max-steps")
        return data.max_steps
    left = len(position.waiting) + len(position.kept) + max(0, num_prompts * data.num_episodes - position.num_drawn)
    if left < config.prompts_per_step:
        raise ConfigError(
            f"--num-episodes {data.num_episodes}: nothing is left to do, --checkpoint-path {directory} leaves {left} "
            f"prompts, and an optimizer step takes {config.prompts_per_step}; raise --num-episodes"
        )
    steps = position.step + left // config.prompts_per_step * num_updates
    return steps if data.max_steps is None else min(steps, data.max_steps)


def _changes(config: Config, directory: Path) -> list[str]:
    before = read_settings(config, directory)
    if isinstance(before, str):
        return [before]
    # T, P, tbs and ibs may differ where these do not.
    changes = changed_settings(before, config, sizes=("prompts_per_step", "sync_period"), without=("tasks",))
    return [*changes, *_task_changes(before.data.tasks or {}, config.data.tasks or {})]


def _task_changes(before: Mapping[str, TaskConfig], now: Mapping[str, TaskConfig]) -> Iterator[str]:
    """Compare what tasks set for themselves; what they have from the run's flags is compared there."""
    for task in dict.fromkeys((*before, *now)):
        if task not in before or task not in now:
            yield f"task {task} is {'defined' if task in now else 'no longer defined'} now"
            continue
        old, new = before[task].given, now[task].given
        for name in dict.fromkeys((*old, *new)):
            pair = [repr(each[name]) if name in each else "the run's" for each in (old, new)]
            if pair[0] != pair[1]:
                yield f"task {task}: {name} was {pair[0]} and is {pair[1]} now"


def _changed_truths(config: Config, source: PromptSource | None, order: DrawOrder) -> Iterator[str]:
    """Report answers that were corrected, or are read from another column."""
    if source is None:
        return
    if not order.ground_truths:
        yield "ground truths are not compared with the checkpoint's run: its version did not write their digest"
    elif order.ground_truths != source.order.ground_truths:
        yield f"ground truths of --dataset {config.data.dataset_text} differ from those of the checkpoint's run"
