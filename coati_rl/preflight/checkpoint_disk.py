"""Say in a dry run how much disk a run's checkpoints take, and how much is free."""

from collections.abc import Iterator

from coati_rl.config.plan import TrainingPlan
from coati_rl.config.training import TrainingConfig
from coati_rl.disk import free_bytes, size_text
from coati_rl.processes.run_dir import checkpoint_bytes, checkpoint_directory, kept_weights_bytes
from coati_rl.text import count


def num_checkpoints(config: TrainingConfig, num_steps: int | None) -> int | None:
    """Return how many checkpoints are on the disk at the end of a run; None if its steps are not known.

    One is written after each interval and one after the last step. --keep-checkpoints is how many of them stay; a
    further one is written before the oldest is deleted, and --keep-best keeps one more.
    """
    interval, kept = config.run.save_interval, config.run.keep_checkpoints
    written = None
    if interval < 1:
        written = 1
    elif num_steps is not None:
        written = -(-num_steps // interval)
    if kept is None:
        return written
    most = kept + 1 + (config.run.keep_best is not None)
    return most if written is None else min(written, most)


def checkpoint_lines(config: TrainingConfig, plan: TrainingPlan) -> Iterator[str]:
    """Yield the line of the plan; none if the model's files are not on this machine."""
    if not (each := checkpoint_bytes(config, plan.precision)):
        return
    number = num_checkpoints(config, plan.num_steps)
    total = f"{size_text(each)} each"
    if number is not None:
        total = f"{size_text(each * number)}, {count(number, 'checkpoint')} of {size_text(each)}"
    free = size_text(free_bytes(checkpoint_directory(config)))
    yield f"{'disk of checkpoints':<24}about {total} ({free} free)"
    if kept := kept_weights_total(config, plan.precision):
        yield f"{'disk of kept weights':<24}about {size_text(kept)} at most (--keep-weights {config.run.keep_weights})"


def kept_weights_total(config: TrainingConfig, precision: str) -> int:
    """Return the bytes that --keep-weights takes at most: one more copy is whole before the oldest is deleted."""
    kept = config.run.kept_weights
    return 0 if kept is None else (kept.last + 1) * kept_weights_bytes(config, precision)
