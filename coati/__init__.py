"""Write your own loop: engines generate, trainers learn, and weights go from one to the other, checked, by a call.

In: a model directory, prompts and rewards. Out: completions, metrics, checkpoints. The calls are the same in one
process, in the processes of torchrun, where each makes all of them, and on Ray actors (`cluster`). Keyword arguments
are the flags of `coati-rl`. Importing this package imports no engine and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coati.engine import Engine
    from coati.module_trainer import ModuleTrainer
    from coati.push import Push
    from coati.ray_cluster import cluster
    from coati.samples import advantages, group_samples, rows
    from coati.trainer import Trainer
    from coati.training_session import TrainingSession
    from coati_rl.samples import Sample
    from consumer.own_module import Split
    from producer.engine_client import Completion
    from rewards.registry import get_reward as reward

__all__ = [
    "Completion", "Engine", "ModuleTrainer", "Push", "Sample", "Split", "Trainer", "TrainingSession", "advantages",
    "cluster", "group_samples", "reward", "rows",
]  # fmt: skip

_HOMES = {
    "Completion": "producer.engine_client",
    "Engine": "coati.engine",
    "ModuleTrainer": "coati.module_trainer",
    "Push": "coati.push",
    "Sample": "coati_rl.samples",
    "Split": "consumer.own_module",
    "Trainer": "coati.trainer",
    "TrainingSession": "coati.training_session",
    "cluster": "coati.ray_cluster",
    "reward": "rewards.registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES.get(name, "coati.samples"))
    return getattr(home, "get_reward" if name == "reward" else name)
