"""Train on a dataset, without producers: an objective, its steps, and evaluations of it on held-out samples."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.config.offline import OfflineConfig
from coati_rl.preflight.resources import load_tokenizer
from coati_rl.protocols import Role
from coati_rl.reading.reward_samples import padding_token_id
from coati_rl.work import EvaluateWork, ReferenceWork
from consumer.backend_config import ModelSource, frozen
from consumer.evaluation import Evaluator, score_samples
from consumer.jobs.job import JobContext, policy_source, start_model
from consumer.objectives.objective import Objective
from consumer.optim.learning_rate import learning_rate
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep

if TYPE_CHECKING:
    from consumer.backend import Backend


def objective_of(config: OfflineConfig) -> Objective:
    """Build the objective of a validated config. Raises: ConfigError for a label that is no token of the model."""
    make: Callable[..., Objective] = pkgutil.resolve_name(config.OBJECTIVE)
    return make(config, lambda: _tokenizer(config))


def models(config: OfflineConfig, directory: Path) -> dict[Role, ModelSource]:
    """Return a trainer's models by role. `directory`: the trained one's; a checkpoint's to go on from it."""
    from consumer.models.scalar_head import ScalarHead  # imports transformers

    head = None
    if config.HAS_SCALAR_HEAD:
        seed = None if config.VALUES_TOKENS else config.run.seed  # a run's critic begins at 0
        head = ScalarHead(seed=seed, pad_token_id=padding_token_id(_tokenizer(config)))
    found: dict[Role, ModelSource] = {"policy": policy_source(config, directory, head)}
    if config.uses_reference:
        is_start = config.reference_model == config.model.model
        found["reference"] = start_model(config) if is_start else frozen(Path(config.reference_model))
    if config.teacher is not None:
        found["teacher"] = frozen(Path(config.teacher))
    return found


@contextmanager
def train_loop(config: OfflineConfig, trainer: JobContext, backend: "Backend", coordinator: Any) -> Iterator[TrainLoop]:
    """Provide a trainer's loop; the coordinator is a `DatasetCoordinator`, which orders no weight sync."""
    objective = objective_of(config)
    step = TrainStep(
        backend,
        objective,
        trainer.timeline,
        learning_rate=learning_rate(config.optimizer),
        recorder=trainer.gradient_recorder(backend, keep=config.run.keep_gradients),
    )
    evaluator = Evaluator(backend, objective, coordinator, trainer.timeline)

    def on_dataset(work: EvaluateWork | ReferenceWork) -> None:
        if isinstance(work, EvaluateWork):
            evaluator(work)
        elif work.batch is None:
            backend.free("reference")
        else:
            logprobs = score_samples(backend, work.batch, "reference")
            if logprobs is not None:
                coordinator.report_reference(work.part, logprobs, rank=trainer.rank)

    yield TrainLoop(
        trainer.rank,
        coordinator,
        coordinator,
        backend,
        lambda is_corrected: step,
        on_dataset=on_dataset,
        **trainer.loop_options(backend, config.run.kept_weights),
    )


def _tokenizer(config: OfflineConfig) -> Any:
    return load_tokenizer(Path(config.model.model), needs_chat_template=False)
