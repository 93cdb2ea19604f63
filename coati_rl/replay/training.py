"""Train steps again in one process: targets, loss, gradient and update, as `consumer.train_step` does on many.

A step's micro-batches hold one sample a row, so that nothing is packed, shared or padded. A gradient is that of the
mean loss, not clipped, by the names that the run's record has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.checkpoint.directory import OBJECTIVE_KEY, load_state
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.stored_views import stored_parameters
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import LossFn, Role
from coati_rl.replay.forward import distilled_scores, tensors_of, token_scores
from coati_rl.replay.parts import Optimizer, Parts, ReplayModel, StepObjective


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Hold the content of a step."""

    step: int  # optimizer steps before it
    micro_batches: tuple[MicroBatch, ...]
    loss_scale: float  # factor from the summed loss to its mean; 0: the step has no samples
    # As they were before targets were filled in; none before that, and in later updates on a batch.
    without_targets: tuple[MicroBatch, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Hold what was computed of a step."""

    metrics: Mapping[str, float | None]  # of the objective, by their names in metrics.jsonl
    gradients: Mapping[Role, Mapping[str, Tensor]]  # of the mean loss
    # Of each tensor the sum of its norms over micro-batches. Where those cancel, the sum of their gradients is smaller,
    # and its rounding is not.
    sizes: Mapping[Role, Mapping[str, float]]


class RecomputedTraining:
    """Hold the models of a run from a checkpoint on, and train its steps again."""

    def __init__(
        self,
        parts: Parts,
        config: TrainingConfig,
        start: Path,
        precision: torch.dtype,
        *,
        is_initial: bool,
        can_train: bool = True,
    ) -> None:
        """Load the models.

        Args:
            parts: of the project.
            config: of the run.
            start: a checkpoint, or the model that the run began with.
            precision: that the trainers compute in; masters are float32.
            is_initial: no step was taken on `start`.
            can_train: `start` has the optimizers' states, or needs none.
        Raises: ConfigError.
        """
        self._parts, self._config, self._precision = parts, config, precision
        self.objective: StepObjective = parts.objective_of(config)
        if not is_initial and (state := load_state(start).get(OBJECTIVE_KEY)):
            self.objective.restore(state)
        self.models = parts.load_models(config, start, precision)
        checkpoint = start if can_train and not is_initial else None
        self._optimizers: dict[Role, Optimizer] = {
            role: parts.make_optimizer(config, role, self.models[role], checkpoint, precision)
            for role in self.objective.losses
        }

    def masters(self) -> dict[Role, dict[str, Tensor]]:
        """Return copies of the float32 masters of the models that the run trains, by the names of its checkpoints."""
        return {role: _as_saved(self.models[role], each.masters) for role, each in self._optimizers.items()}

    def with_targets(self, batch: StepBatch) -> tuple[StepBatch, dict[str, Tensor]]:
        """Score the micro-batches and fill in what the loss reads. Returns: also the sums that the targets report."""
        objective, micro_batches = self.objective, batch.micro_batches
        with torch.no_grad():
            for place, models in enumerate((objective.scores, objective.entropies)):
                for name, role in models.items():
                    micro_batches = tuple(
                        each.with_arrays(**{name: token_scores(self._model(role), each)[place].numpy()})
                        for each in micro_batches
                    )
        micro_batches, sums = objective.targets(micro_batches)
        if objective.needs_whole_step:
            micro_batches = tuple(objective.with_whole_step(micro_batches, _as_floats))
        return replace(batch, micro_batches=micro_batches, without_targets=batch.micro_batches), sums

    def result_of(self, batch: StepBatch, of_targets: Mapping[str, Tensor]) -> StepResult:
        """Compute loss and gradients of a step with its targets; weights stay as they are."""
        sums = dict(of_targets)
        gradients, sizes = dict[Role, Mapping[str, Tensor]](), dict[Role, Mapping[str, float]]()
        for role in self.objective.losses:
            gradients[role], sizes[role], terms = self._gradient(role, batch)
            sums = merge_sums(sums, terms)
        metrics = self.objective.metrics(_as_floats(sums), loss_scale=batch.loss_scale) if sums else {}
        self._sums = _as_floats(sums)
        return StepResult(metrics=metrics, gradients=gradients, sizes=sizes)

    def rounded_gradient(self, role: Role, batch: StepBatch) -> dict[str, Tensor]:
        """Return a model's gradient as plain transformers compute it in the run's precision, targets included."""
        modules = [model.module for model in self.models.values()]
        dtype = next(modules[0].parameters()).dtype
        for module in modules:
            _convert(module, self._precision)  # the weights are in it already: nothing is lost on the way back
        try:
            if batch.without_targets:
                batch, _ = self.with_targets(replace(batch, micro_batches=batch.without_targets))
            return {name: each.double() for name, each in self._gradient(role, batch)[0].items()}
        finally:
            for module in modules:
                _convert(module, dtype)

    def update(self, batch: StepBatch, result: StepResult, learning_rate: float) -> None:
        """Take the optimizer steps of a step on its gradients, as `result_of` has returned them just now."""
        settings = self._config.optimizer
        for role in self.objective.losses:
            rate = self.objective.rate_of(role, batch.step)
            for number in range(self.objective.num_steps(role)):
                gradients = self._gradient(role, batch)[0] if number else result.gradients[role]
                if rate and batch.loss_scale:
                    norm = norm_of(gradients.values())
                    factor = min(1.0, settings.max_grad_norm / (norm + 1e-6))
                    clipped = {name: gradient * factor for name, gradient in gradients.items()}
                    self._optimizers[role].step(clipped, settings, rate * learning_rate)
        if self._sums:
            self.objective.end_step(self._sums)
        if mix := self.objective.reference_mix(batch.step):
            self._move_reference(mix)

    def _gradient(self, role: Role, batch: StepBatch) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
        """Return gradients, their sizes (see `StepResult`), and the sums that the loss reports."""
        model, loss_fn = self.models[role], self.objective.losses[role]
        gradients = {name: torch.zeros_like(parameter) for name, parameter in model.trained.items()}
        sizes, sums = dict.fromkeys(gradients, 0.0), dict[str, Tensor]()
        for micro_batch in batch.micro_batches:
            loss, terms = self._loss(model, loss_fn, micro_batch, batch.step)
            sums = merge_sums(sums, terms)
            if not loss.requires_grad:
                continue
            found = torch.autograd.grad(loss * batch.loss_scale, [*model.trained.values()], allow_unused=True)
            for name, gradient in zip(gradients, found, strict=True):
                if gradient is not None:
                    gradients[name] += gradient
                    sizes[name] += float(gradient.norm())
        return gradients, sizes, sums

    def _loss(
        self, model: ReplayModel, loss_fn: LossFn, micro_batch: MicroBatch, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of a micro-batch, and what it reports; see `DistilledLoss` for a teacher's part."""
        arrays = tensors_of(micro_batch, step=step)
        if not isinstance(loss_fn, DistilledLoss):
            return loss_fn(*token_scores(model, micro_batch), arrays)
        teacher = self._model("teacher")
        logprobs, entropies, divergence = distilled_scores(model, teacher, micro_batch, loss_fn.direction)
        loss, terms = loss_fn(logprobs, entropies, arrays)
        of_teacher = loss_fn.kl_coeff * (arrays["loss_weights"] * divergence).sum()
        reported = {"loss_sum": of_teacher.detach().double(), "teacher_kl_sum": divergence.detach().double().sum()}
        return loss + of_teacher, merge_sums(terms, reported)

    def _model(self, role: Role) -> ReplayModel:
        if role not in self.models:
            raise ConfigError(f"the {role} model of this run cannot be loaded here")
        return self.models[role]

    def keep_old_policy(self) -> None:
        """Copy the policy's weights to the "old" model, if the run has one."""
        if "old" in self.models:
            _copy(self.models["policy"].module, self.models["old"].module, 1.0)

    def load_old_policy(self, directory: Path) -> None:
        """Give the "old" model, if the run has one, the policy's weights of another step."""
        if "old" in self.models:
            policy = self._parts.load_models(self._config, directory, self._precision)["policy"]
            _copy(policy.module, self.models["old"].module, 1.0)

    def _move_reference(self, mix: float) -> None:
        _copy(self.models["policy"].module, self.models["reference"].module, mix)


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module, mix: float) -> None:
    theirs = dict(source.named_parameters())
    for name, weight in target.named_parameters():
        weight.copy_(theirs[name] if mix == 1 else torch.lerp(weight, theirs[name], mix))


def _as_saved(model: ReplayModel, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if model.has_adapters:
        return {name: each.detach().clone() for name, each in masters.items()}
    stored = stored_parameters(model.module)
    parts = (part for name, each in masters.items() for part in stored[name].split(each.detach()))
    return {name: each.clone() for name, each in parts}


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model; buffers such as rotary frequencies stay in float32 at least, as where a model is loaded."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float32 if dtype == torch.bfloat16 else dtype)


def norm_of(tensors: Any) -> float:
    """Return the norm over all elements of tensors, in float64."""
    squares: Sequence[Tensor] = [tensor.double().square().sum() for tensor in tensors]
    return float(torch.stack([*squares]).sum().sqrt()) if squares else 0.0


def _as_floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}
