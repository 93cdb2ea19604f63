"""Hold one rank of a trainer: models, objective and optimizer, and its part in sending the weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from coati_rl.batching.packing import build_mini_batch, probe_micro_batch
from coati_rl.checkpoint.directory import OBJECTIVE_KEY, load_state
from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.plan import resolve_dtype
from coati_rl.config.sync import SyncConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.processes.freed_memory import return_freed_memory
from coati_rl.protocols import Role
from coati_rl.samples import RaggedBatch
from consumer.backend import Backend, make_backend
from consumer.backend_config import ModelSource
from consumer.evaluation import score_samples
from consumer.jobs import offline, rl
from consumer.jobs.job import backend_config, policy_source, start_model
from consumer.joined_rank import TIMEOUT_S, JoinedRank
from consumer.objectives.objective import Objective
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.objectives.run_objective import policy_gradient
from consumer.offloaded_parts import OffloadedParts
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
from consumer.weight_sync.rank_role import make_sender
from consumer.weight_sync.rank_sender import RankSender


class TrainerRank(JoinedRank):
    """Train on this rank's share of samples; methods are collective over the ranks."""

    _is_built = False

    def build(self, config: TrainingConfig, own: Objective | None, address: str, in_turns: bool) -> None:
        """Load the models.

        Args:
            config: whose layout has as many ranks as torch's default process group; one without such a group.
            own: objective in place of the config's.
            address: of the first rank, as engines reach it; empty: all are on this machine.
            in_turns: engines in other processes share this rank's device.
        """
        self._config, self._own, self._address, self._in_turns = config, own, address, in_turns
        self._dtype = resolve_dtype(config, self.kind)
        torch.manual_seed(config.run.seed)
        self._load(Path(config.model.model))

    def _load(self, directory: Path) -> None:
        config, models = self._config, dict[Role, ModelSource]()
        if self._own is not None:
            objective = self._own
            models["policy"] = policy_source(config, directory)
            if "reference" in objective.roles:
                models["reference"] = start_model(config)
        elif isinstance(config, OfflineConfig):
            objective, models = offline.objective_of(config), offline.models(config, directory)
        else:
            assert isinstance(config, Config)  # noqa: S101, the other kind of job
            objective = _with_old_policy(policy_gradient(config))
            models = rl.models(config, directory, keeps_old_policy=objective.keeps_old_policy)
        settings = backend_config(config, models, dtype=self._dtype)
        self._backend = (
            make_backend(settings, device=self.device, timeout_s=TIMEOUT_S)
            if dist.is_initialized()
            else Backend(settings, SingleProcess(device=self.device))
        )
        self._offloaded_parts = OffloadedParts(
            self.device,
            {
                "weights": lambda: (each for model in self._backend.models.values() for each in model.memory.weights()),
                "optimizer": lambda: (
                    each for model in self._backend.models.values() for each in model.memory.optimizer_tensors()
                ),
            },
        )
        self._objective = objective
        peak = LearningRate(peak=config.optimizer.learning_rate)
        self._train_step = TrainStep(self._backend, objective, learning_rate=peak)
        sync = config.sync if isinstance(config, Config) else SyncConfig()
        sender = make_sender(
            self._backend,
            sync.weight_transport,
            gpu_memory_utilization=config.parallel.gpu_memory_utilization if isinstance(config, Config) else 1.0,
            host=self._address or "127.0.0.1",
            is_one_node=not self._address,
            directory=None,
            shares_process=self.shares_process,
            in_turns=self._in_turns,
        )
        self._sender = RankSender(self._backend, sender)
        self._is_built = True

    def unit(self) -> int:
        """Return the samples that the loss compares, which stay together."""
        return self._objective.unit

    def sample_arrays(self) -> tuple[str, ...]:
        """Return the arrays that samples must hold for the loss."""
        return self._objective.sample_arrays

    def keep_old_policy(self) -> None:
        """Copy the policy to the model that computes old_logprobs, if the loss has one."""
        if "old" in self._objective.roles:
            self._backend.keep_old_policy()

    def forward_backward(self, batch: RaggedBatch) -> dict[str, Any]:
        """Add the gradient of this rank's samples. Returns: metrics of the samples of all ranks; none without head."""
        sums = self._backend.reduce_sums(self._train_step.accumulate(build_mini_batch(batch)))
        return self._objective.metrics(sums, loss_scale=batch.loss_scale) if sums else {}

    def optim_step(self, step: int, loss_scale: float, learning_rate: float, changes: dict[str, Any]) -> dict[str, Any]:
        """Take a step; `changes` are fields of `OptimizerConfig`. Returns: the metrics of all its samples."""
        settings = self._config.optimizer.model_copy(update=changes)
        return self._train_step.finish(step=step, loss_scale=loss_scale, learning_rate=learning_rate, settings=settings)

    def drop_step(self) -> None:
        """Begin the step anew, without what has been accumulated; not collective."""
        self._train_step.drop()

    def score(self, batch: RaggedBatch, model: Role) -> list[np.ndarray] | None:
        """Return float32[N] log-probabilities of each of this rank's samples; None without the head."""
        return score_samples(self._backend, batch, model)

    def probe(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of tokens after the first, in bfloat16 also those of float32; none headless."""
        probe = probe_micro_batch(token_ids)
        scores = [self._backend.score([probe])]
        if self._dtype == "bfloat16":
            scores.append(self._backend.score_float32([probe]))
        return [each[0][0].float().cpu().numpy() for each in scores if each]

    def save(self, directory: Path, step: int) -> None:
        """Write a checkpoint."""
        state = {"step": step, "policy_version": step, "data": {}}
        self._backend.save(directory, state=state, objective=self._objective.state())

    def load(self, directory: Path) -> None:
        """Go on with the weights, the optimizer and the random state of a checkpoint."""
        self.meta()
        self._load(directory)
        self._backend.restore(directory)
        self._objective.restore(load_state(directory).get(OBJECTIVE_KEY, {}))

    def meta(self) -> None:
        """Leave the engines, and drop the models; `load` builds others."""
        if self._is_built:
            self._sender.close()
            self._backend.close()
            del self._sender, self._backend, self._train_step, self._offloaded_parts
            self._is_built = False
            return_freed_memory(self.device)

    def live_weights(self) -> dict[str, torch.Tensor]:
        """Return the policy's weights by name, not copied, for an engine of this process."""
        return {name: weight.detach() for name, weight in self._backend.policy.parameters.local.items()}

    def close(self) -> None:
        """End the layout's process groups."""
        self.meta()


def _with_old_policy(objective: PolicyGradient) -> PolicyGradient:
    """Let a copy of the policy compute old_logprobs, if the trainer does: a loop takes any steps between two syncs."""
    if objective.old_policy_period is None:
        return objective
    return replace(objective, old_policy_period=objective.updates_per_batch + 1)
