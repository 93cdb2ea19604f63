"""Train a policy with producers: the policy gradient on their rollouts, and weight syncs to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.protocols import TrainBackend, TrainerCoordinator
from consumer.jobs.job import Models, Trainer
from consumer.objectives.policy_gradient import policy_gradient
from consumer.optim.learning_rate import learning_rate
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep


def models(config: Config) -> Models:
    """Return the models that a trainer holds besides the policy."""
    return Models(
        reference_dir=Path(config.model.model) if config.algorithm.kl_coeff > 0 else None,
        teacher_dir=None if config.distillation.teacher is None else Path(config.distillation.teacher),
        keeps_old_policy="old" in policy_gradient(config.with_gap_correction()).roles,
    )


@contextmanager
def train_loop(
    config: Config, trainer: Trainer, backend: TrainBackend, coordinator: TrainerCoordinator
) -> Iterator[TrainLoop]:
    """Provide a trainer's loop, and what it publishes weights with."""
    from coati_rl.runtime.cluster import own_address  # imports Ray
    from coati_rl.runtime.remote import RemoteProducer
    from consumer.logprob_mismatch import make_mismatch_meter
    from consumer.weight_sync.rank_role import publishing

    meter = make_mismatch_meter(backend, config, trainer.timeline)
    plain, correcting = (
        TrainStep(
            backend,
            objective,
            trainer.timeline,
            learning_rate=learning_rate(config.optimizer),
            mismatch_meter=meter,
        )
        for objective in (policy_gradient(config), policy_gradient(config.with_gap_correction()))
    )
    publisher: Any = publishing(
        backend,
        config,
        lambda producer: RemoteProducer(f"producer-{producer}", trainer.namespace),
        coordinator,
        host=own_address(config),
        directory=trainer.run_dir / "weights",
    )
    with publisher as publish:
        yield TrainLoop(
            trainer.rank,
            coordinator,
            coordinator,
            backend,
            lambda is_corrected: correcting if is_corrected else plain,
            publish=publish,
            **trainer.loop_options(backend),
        )
