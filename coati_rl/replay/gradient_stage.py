"""Compare loss, gradient and update of a step with what the run has recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coati_rl.errors import ConfigError
from coati_rl.observability.gradients import GRADIENTS, gradient_file
from coati_rl.ops.gradient_sketch import place_of, summary_of
from coati_rl.protocols import Role
from coati_rl.replay.parts import ReplayModel
from coati_rl.replay.stage import Stage, checked, unchecked
from coati_rl.replay.training import RecomputedTraining, StepBatch, StepResult, norm_of
from coati_rl.run_reader.json_lines import read_json_lines
from coati_rl.text import count

# Of what a metric depends on beside the step: rounding is measured now and then, the gap with earlier weights, too.
_LEFT_OUT = ("logprob_rounding", "logprob_gap", "logprob_shift")
_SCORES = ("kl_mean", "teacher_kl_mean", "old_logprob_gap_mean", "old_logprob_gap_max", "explained_variance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bound what rounding explains."""

    metric: float  # relative, and absolute of numbers below 1
    gradient: float  # of a tensor's norm and signed sums, relative to its norm
    update: float  # norm of the difference of two updates, relative to that of one


TOLERANCES = {
    torch.float32: Tolerance(metric=2e-5, gradient=1e-5, update=2e-2),
    torch.bfloat16: Tolerance(metric=5e-2, gradient=1e-3, update=0.5),
}
MAX_ROUNDING = 4.0  # times what plain transformers' rounding in the run's precision amounts to on the same step
_SMALL = 1e-2  # of the whole norm: a tensor of less is compared relative to this much; its rounding is the whole's


def check_metrics(result: StepResult, record: Mapping[str, Any], tolerance: Tolerance) -> list[Stage]:
    """Compare what the loss reports: first what depends on scores alone, then the loss."""
    found = {name: value for name, value in result.metrics.items() if not name.startswith(_LEFT_OUT)}
    scores = {name: value for name, value in found.items() if name in _SCORES and value is not None}
    others = {name: value for name, value in found.items() if name not in _SCORES}
    stages = [_compared("scores", scores, record, tolerance)] if scores else []
    return [*stages, _compared("loss", others, record, tolerance)]


def _compared(name: str, found: Mapping[str, float | None], record: Mapping[str, Any], tolerance: Tolerance) -> Stage:
    problem = None
    for key, value in found.items():
        if key not in record:
            continue
        recorded = record[key]
        if (value is None) != (recorded is None):
            problem = problem or f"{key}: recorded {recorded}, recomputed {value}"
        elif value is not None and not _is_close(value, recorded, tolerance.metric):
            problem = problem or f"{key}: recorded {recorded:.9g}, recomputed {value:.9g}"
    shown = [f"{key} {value:.6g}" for key, value in found.items() if value is not None and key in record]
    return checked(name, problem, ", ".join(shown[:4]))


def _is_close(value: float, recorded: float, tolerance: float) -> bool:
    return abs(value - recorded) <= tolerance * max(1.0, abs(recorded))


def recorded_gradients(run_dir: Path, step: int) -> dict[str, Mapping[str, list[float]]]:
    """Return what the run has recorded of a step's gradients, by model."""
    lines = read_json_lines(gradient_file(run_dir / GRADIENTS, step))
    return {line["model"]: line["tensors"] for line in lines if line.get("step") == step}


def check_gradients(
    training: RecomputedTraining,
    batch: StepBatch,
    result: StepResult,
    *,
    record: Mapping[str, Any],
    recorded: Mapping[str, Mapping[str, list[float]]],
    tolerance: float,
) -> list[Stage]:
    """Compare each trained model's gradient: its norm, and the norm and signed sums of each tensor."""
    stages = []
    for role, gradients in result.gradients.items():
        name = "gradient" if role == "policy" else f"gradient of {role}"
        norm = norm_of(gradients.values())
        whole = record.get("grad_norm" if role == "policy" else f"{role}_grad_norm")
        if role in recorded:
            compared = _Compared(training, batch, role, result)
            stages.append(compared.stage(name, recorded[role], tolerance))
        elif whole is None:
            stages.append(unchecked(name, "nothing is recorded of it"))
        else:
            close = abs(norm - whole) <= 10 * tolerance * max(norm, 1e-12)
            text = f"norm: recorded {whole:.9g}, recomputed {norm:.9g}; its tensors are not recorded"
            stages.append(checked(name, None if close else text, text))
    return stages


class _Compared:
    """Compare the tensors of a model's gradient with their records."""

    def __init__(self, training: RecomputedTraining, batch: StepBatch, role: Role, result: StepResult) -> None:
        self._training, self._batch, self._role = training, batch, role
        self._gradients, self._sizes = result.gradients[role], result.sizes[role]
        self._norm = norm_of(self._gradients.values())

    def stage(self, name: str, recorded: Mapping[str, list[float]], tolerance: float) -> Stage:
        """Return the stage. `tolerance`: of a relative difference that needs no look at the run's rounding."""
        if missing := sorted({*recorded} ^ {*self._gradients}):
            return checked(name, f"{missing[0]} is in one of recorded and recomputed gradients only", "")
        errors = {
            tensor: self._distance(
                tensor, _summary(self._gradients[tensor], tensor), torch.tensor(values, dtype=torch.float64)
            )
            for tensor, values in recorded.items()
        }
        where = max(errors, key=errors.__getitem__)
        figures = f"norm {self._norm:.6g}, {count(len(recorded), 'tensor')}; largest relative difference "
        figures += f"{errors[where]:.2g} ({where})"
        if errors[where] <= tolerance:
            return checked(name, None, figures)
        rounding = self._rounding()
        beyond = [each for each, error in errors.items() if error > max(tolerance, MAX_ROUNDING * rounding[each])]
        if not beyond:
            return checked(name, None, f"{figures}, where the run's precision rounds by {rounding[where]:.2g}")
        first = max(beyond, key=errors.__getitem__)
        norm = float(self._gradients[first].norm())
        text = f"{first}: relative difference {errors[first]:.3g}, norm recorded {recorded[first][0]:.9g}"
        return checked(name, f"{text}, recomputed {norm:.9g}; rounding explains {rounding[first]:.2g}", "")

    def _rounding(self) -> dict[str, float]:
        """Return how far each tensor is from that in the run's precision, relatively."""
        rounded = self._training.rounded_gradient(self._role, self._batch)
        return {
            name: self._distance(name, _summary(gradient, name), _summary(rounded[name], name))
            for name, gradient in self._gradients.items()
        }

    def _distance(self, name: str, one: Tensor, other: Tensor) -> float:
        scale = max(float(one[0]), float(other[0]), self._sizes[name], _SMALL * self._norm, 1e-30)
        return float((one - other).abs().max()) / scale


def _summary(gradient: Tensor, name: str) -> Tensor:
    """Return float64[1 + NUM_SUMS]: the norm, and the signed sums."""
    summary = summary_of(gradient, name, place_of(tuple(gradient.shape)))
    summary[0] = summary[0].sqrt()
    return summary


def check_update(
    before: Mapping[Role, Mapping[str, Tensor]],
    models: Mapping[Role, ReplayModel],
    directories: Mapping[Role, Path],
    tolerance: float,
) -> Stage:
    """Compare the weights after the step with those of the step's checkpoint.

    Args:
        before: weights before the step, of the trained models.
        models: trained, after the recomputed step.
        directories: of the checkpoint that the run wrote after the step.
        tolerance: of the updates.
    """
    worst, where = 0.0, ""
    for role, model in models.items():
        saved = _saved_weights(directories[role])
        differences, moves = list[Tensor](), list[Tensor]()
        for name, parameter in model.trained.items():
            if name not in saved:
                raise ConfigError(f"{directories[role]}: has no {name}")
            move = parameter.detach() - before[role][name]
            differences.append(saved[name].to(parameter.dtype) - parameter.detach())
            moves.append(move)
        size = norm_of(moves)
        error = norm_of(differences) / max(size, 1e-30) if norm_of(differences) else 0.0
        if error > worst:
            worst, where = error, f"{role} moved by {size:.3g} in norm, and is {norm_of(differences):.3g} off"
    text = f"weights after the step: relative difference of the update {worst:.2g}"
    return checked("update", None if worst <= tolerance else f"{text} ({where})", text)


def _saved_weights(directory: Path) -> dict[str, Tensor]:
    weights = dict[str, Tensor]()
    for path in sorted(directory.glob("*model*.safetensors")):
        with safe_open(path, "pt") as file:
            weights |= {key.removeprefix("base_model.model."): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return weights
