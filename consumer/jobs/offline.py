"""Train on a dataset, without producers: an objective, its steps, and evaluations of it on held-out samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coati_rl.config.offline import OfflineConfig
from coati_rl.protocols import TrainBackend
from consumer.evaluation import Evaluator
from consumer.jobs.job import Models, Trainer
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.objectives.objective import Objective
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep


def objective_of(config: OfflineConfig) -> Objective:
    """Build the objective of a validated config."""
    return CrossEntropy()


def models(config: OfflineConfig) -> Models:
    """Return the models that a trainer holds besides the one that it trains."""
    return Models(has_reference="reference" in objective_of(config).roles)


@contextmanager
def train_loop(config: OfflineConfig, trainer: Trainer, backend: TrainBackend, coordinator: Any) -> Iterator[TrainLoop]:
    """Provide a trainer's loop; the coordinator is a `DatasetCoordinator`, which orders no weight sync."""
    objective = objective_of(config)
    step = TrainStep(backend, objective, trainer.timeline, learning_rate=config.optimizer.learning_rate)
    yield TrainLoop(
        trainer.rank,
        coordinator,
        coordinator,
        backend,
        lambda is_corrected: step,
        evaluate=Evaluator(backend, objective, coordinator, trainer.timeline),
        **trainer.loop_options(backend),
    )
