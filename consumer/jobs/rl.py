"""Train a policy with producers: the policy gradient on their rollouts, and weight syncs to them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.checkpoint.directory import role_directory
from coati_rl.config import Config
from coati_rl.preflight.resources import load_tokenizer
from coati_rl.protocols import Role, TrainerCoordinator
from coati_rl.reading.reward_samples import padding_token_id
from coati_rl.runtime.address import own_address
from consumer.backend_config import ModelSource, frozen
from consumer.jobs.job import JobContext, policy_source, start_model, trained_model
from consumer.objectives.run_objective import make_coefficients, policy_gradient
from consumer.optim.learning_rate import learning_rate
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep

if TYPE_CHECKING:
    from consumer.backend import Backend
    from consumer.models.scalar_head import ScalarHead


def models(config: Config, directory: Path, *, keeps_old_policy: bool = False) -> dict[Role, ModelSource]:
    """Return a trainer's models by role.

    Args:
        config: of the run.
        directory: the policy's; a checkpoint's to go on from it.
        keeps_old_policy: with a copy of the old policy, also if the run's own steps would need none.
    """
    found: dict[Role, ModelSource] = {"policy": policy_source(config, directory)}
    if config.algorithm.has_critic:
        saved = role_directory(directory, "value")
        start = Path(config.critic.critic_model or config.model.model)
        found["value"] = trained_model(config, start, saved if saved.is_dir() else None, head=_critic_head(config))
    if config.algorithm.kl_coeff > 0:
        found["reference"] = _reference(config, directory)
    if config.distillation.teacher is not None:
        found["teacher"] = frozen(Path(config.distillation.teacher))
    if keeps_old_policy or "old" in policy_gradient(config.with_gap_correction()).roles:
        found["old"] = replace(start_model(config), adapters=None) if config.lora.is_on else frozen(directory)
    return found


def _reference(config: Config, directory: Path) -> ModelSource:
    """Return the start model; one that moves is in the checkpoint, if that is of a run in which it did."""
    if config.control.reference_moves is None:
        return start_model(config)
    saved = role_directory(directory, "reference")
    return ModelSource(directory=saved if saved.is_dir() else Path(config.model.model), is_saved=True)


def _critic_head(config: Config) -> "ScalarHead":
    from consumer.models.scalar_head import ScalarHead  # imports transformers

    pad_token_id = padding_token_id(load_tokenizer(Path(config.model.model), needs_chat_template=False))
    return ScalarHead(seed=None, pad_token_id=pad_token_id)


@contextmanager
def train_loop(
    config: Config, trainer: JobContext, backend: "Backend", coordinator: TrainerCoordinator
) -> Iterator[TrainLoop]:
    """Provide a trainer's loop, and what it publishes weights with."""
    from coati_rl.runtime.remote import RemoteProducer  # imports Ray
    from consumer.logprob_mismatch import make_mismatch_meter
    from consumer.turns import TrainersTurn
    from consumer.weight_sync.rank_role import publishing

    meter = make_mismatch_meter(backend, config, trainer.timeline)
    coefficients = make_coefficients(config)
    coefficients.restore(trainer.objective_state)
    keep = config.run.keep_gradients if config.run.rollout_detail == "full" else 0
    recorder = trainer.gradient_recorder(backend, keep=keep)
    plain, correcting = (
        TrainStep(
            backend,
            objective,
            trainer.timeline,
            learning_rate=learning_rate(config.optimizer),
            mismatch_meter=meter,
            recorder=recorder,
        )
        for objective in (policy_gradient(each, coefficients) for each in (config, config.with_gap_correction()))
    )

    def connect(producer: int) -> RemoteProducer:
        return RemoteProducer(f"producer-{producer}", trainer.namespace)

    publisher: Any = publishing(
        backend,
        config,
        connect,
        coordinator,
        host=own_address(config),
        directory=trainer.run_dir / "weights",
    )
    with publisher as publication, ExitStack() as stack:
        turns: dict[str, Any] = {}
        if config.takes_turns:
            turn = TrainersTurn(
                backend,
                connect=connect,
                publication=publication,
                directory=trainer.run_dir,
                timeout_s=config.cluster.heartbeat_timeout_s,
                timeline=trainer.timeline,
            )
            turns["hand_over"] = stack.enter_context(closing(turn)).hand_over
        yield TrainLoop(
            trainer.rank,
            coordinator,
            coordinator,
            backend,
            lambda is_corrected: correcting if is_corrected else plain,
            publish=publication.publish,
            score_probe=publication.score_probe,
            **turns,
            **trainer.loop_options(backend, config.run.kept_weights),
        )
