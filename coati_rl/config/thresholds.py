"""Find the reward from which a response is correct, where one graded reward decides that (--correct-from)."""

from coati_rl.config.config import Config
from coati_rl.config.training import TrainingConfig


def thresholds(config: Config) -> dict[str, float]:
    """Return it by task, for the tasks whose only reward is a function, a model or an environment."""
    found = {name: each.reward.threshold for name, each in config.by_task.items()}
    return {name: threshold for name, threshold in found.items() if threshold is not None}


def common_threshold(config: TrainingConfig) -> float | None:
    """Return the one of all tasks; None if there is none, or they differ."""
    found = {each.reward.threshold for each in config.by_task.values()} if isinstance(config, Config) else set()
    return found.pop() if len(found) == 1 else None
