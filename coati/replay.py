"""Run `coati-rl replay`: put together what a replay needs of rewards, objectives, models and optimizers."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coati_rl.checkpoint.directory import role_directory
from coati_rl.config import Config
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.model_files.stored_views import StoredParameter, stored_parameters
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.protocols import Role
from coati_rl.replay.command import run_command
from coati_rl.replay.parts import Parts, ReplayModel
from consumer.adapters.adapters import Adapters
from consumer.backend_config import ModelSource
from consumer.checkpoint import CheckpointReader
from consumer.jobs.jobs import models_of
from consumer.jobs.offline import objective_of
from consumer.models.routers import Routers, replayed_routing
from consumer.models.scalar_head import load_scalar, scalar_head
from consumer.objectives.run_objective import policy_gradient
from consumer.optim.optimizer import make_optimizer, set_step, state_kinds
from consumer.optim.optimizer_state import check_kinds, unpack_state
from consumer.optim.weight_decay import names_without_decay
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters
from producer.made_environment import check_environment
from rewards.registry import columns_of, default_system_prompt, needs_ground_truth
from rewards.scorer import scorer_factory


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a step. Returns: the exit code."""
    return run_command(arguments, parts)


def parts() -> Parts:
    """Return the parts of this project."""
    return Parts(
        objective_of=_objective_of,
        load_models=_load_models,
        make_optimizer=_Updates,
        open_scorer=lambda config: scorer_factory(config, in_cluster=False)(),
        rewards=RewardFacts(
            default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
        ),
        environment=check_environment,
    )


def _objective_of(config: TrainingConfig) -> Any:
    if isinstance(config, Config):
        return policy_gradient(config)
    if getattr(config, "precomputes_reference", False):  # the reference's log-probabilities are computed again
        config = config.with_changes(precompute_reference=False)
    return objective_of(config)  # type: ignore[arg-type]


def _load_models(config: TrainingConfig, directory: Path, precision: torch.dtype) -> dict[Role, ReplayModel]:
    sources: Mapping[Role, ModelSource] = models_of(config, directory)
    replays = {"policy", "old"} if config.router_replay == "rollout" else set[Role]()
    return {role: _load(each, precision, replays_routes=role in replays) for role, each in sources.items()}


def _load(source: ModelSource, precision: torch.dtype, *, replays_routes: bool) -> ReplayModel:
    """Load a model, rounded as the trainers' is; the frozen base of an adapter is a model of its own here."""
    module: Any
    if source.head is not None:
        module = load_scalar(source.directory, source.head, dtype=precision)
        module.set_attn_implementation("sdpa")
    else:
        try:
            with no_progress_bars():
                module = AutoModelForCausalLM.from_pretrained(
                    source.directory,
                    dtype=precision,
                    attn_implementation="sdpa",
                    experts_implementation="eager",  # grouped products have no float64
                    trust_remote_code=False,
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source.directory}: cannot be loaded: {error}") from error
    module.eval()
    module.requires_grad_(False)
    trained: dict[str, Any] = {}
    if source.adapters is not None:
        infos = describe_parameters(module, Layout(), [module.config.get_text_config().num_hidden_layers])
        adapters = Adapters(module, infos, source.adapters)
        trained = dict(adapters.parameters) if source.optimizer is not None else {}
        adapters.attach(module, Layout())
    elif source.optimizer is not None:
        trained = dict(module.named_parameters())
    if replays_routes:
        Routers.attached(module, 0.0)
    # In float64 what differs from a float32 run is that one's rounding.
    module.to(torch.float64 if precision == torch.float32 else torch.float32)
    for parameter in module.parameters():
        parameter.requires_grad_(any(parameter is each for each in trained.values()))
    return ReplayModel(
        module=module,
        trained=trained,
        scalar_head=scalar_head(module) if source.head is not None else None,
        has_adapters=source.adapters is not None,
        routing=partial(replayed_routing, device=torch.device("cpu")) if replays_routes else None,
    )


class _Updates:
    """Update a model by the trainers' optimizer, on float32 masters."""

    def __init__(
        self, config: TrainingConfig, role: Role, model: ReplayModel, checkpoint: Path | None, precision: torch.dtype
    ) -> None:
        """Take the optimizer's state from a checkpoint; None: no step was taken."""
        self._model, self._precision = model, precision
        self.masters: dict[str, Tensor] = {name: each.detach().float() for name, each in model.trained.items()}
        self._optimizer: Any = make_optimizer(
            self.masters, config.optimizer, without_decay=names_without_decay(model.module)
        )
        if checkpoint is None:
            return
        directory = checkpoint if role == "policy" else role_directory(checkpoint, role)
        if not directory.is_dir():
            return
        reader = CheckpointReader(directory)
        expected = state_kinds(config.optimizer)
        check_kinds(reader.kinds, expected, directory, has_optimizer_files=reader.has_optimizer_files)
        stored = {} if model.has_adapters else stored_parameters(model.module)

        def read(name: str, kind: str) -> Tensor | None:
            own = StoredParameter(name=name, shape=tuple(self.masters[name].shape))
            return reader.get(kind, stored.get(name, own))

        unpack_state(self._optimizer, self.masters, read, reader.kinds)

    def step(self, gradients: Mapping[str, Tensor], settings: OptimizerConfig, learning_rate: float) -> None:
        """See `coati_rl.replay.parts.Optimizer`."""
        set_step(self._optimizer, settings, learning_rate)
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient.float()
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._model.trained.items():
                self.masters[name].grad = None
                parameter.copy_(self.masters[name].to(self._precision))
