"""Compare loss, gradient and update of a step with what the run has recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coati_rl.algorithms.sums import is_maximum
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import PREFIX
from coati_rl.observability.step_files import GRADIENTS, step_file
from coati_rl.ops.gradient_sketch import place_of, summary_of
from coati_rl.protocols import Role
from coati_rl.replay.rollout_stages import MAX_GAP
from coati_rl.replay.stage import ReplayStage, checked, unchecked
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
    largest: float  # likewise, of a metric that is its largest token's: rounding of one token is no mean
    gradient: float  # of a tensor's norm and signed sums, relative to its norm
    # Where a tensor differs by more: a signed sum, in norms of plain transformers' rounding in the run's precision. The
    # norm of what was rounded is the deviation of such a sum, and the largest of a hundred is about three of these.
    rounding: float
    whole: float | None  # likewise the norm of the whole gradient's difference, which is no single sum; None: any
    update: float | None  # norm of the difference of two updates, relative to that of one; None: it says nothing


_WHOLE = 4.0  # the run packs, shards and fuses: its rounding is independent of plain transformers', and of another size


def tolerance_of(precision: torch.dtype, *, is_retrained: bool) -> Tolerance:
    """Return the limits of a run's precision.

    Weights that were trained again differ by more than rounding: Adam's first steps are of the learning rate's size for
    elements, too, of which the gradient is all rounding.
    """
    if precision == torch.float32:
        near = 1e-3 if is_retrained else 1e-5
        metric = max(near, 2e-5)
        return Tolerance(metric=metric, largest=metric, gradient=near, rounding=3 * _WHOLE, whole=_WHOLE, update=2e-2)
    mean, largest = MAX_GAP[precision]
    rounding = 32.0 if is_retrained else 8.0
    return Tolerance(metric=mean, largest=largest, gradient=1e-3, rounding=rounding, whole=None, update=None)


MASTER = "master"  # the kind of a checkpoint's float32 tensors
_SMALL = 1e-2  # of the whole norm: a tensor of less is compared relative to this much; its rounding is the whole's


def check_metrics(result: StepResult, record: Mapping[str, Any], tolerance: Tolerance) -> list[ReplayStage]:
    """Compare what the loss reports: first what depends on scores alone, then the loss."""
    found = {name: value for name, value in result.metrics.items() if not name.startswith(_LEFT_OUT)}
    scores = {name: value for name, value in found.items() if name in _SCORES and value is not None}
    others = {name: value for name, value in found.items() if name not in _SCORES}
    stages = [_compared("scores", scores, record, tolerance)] if scores else []
    return [*stages, _compared("loss", others, record, tolerance)]


def _compared(
    name: str, found: Mapping[str, float | None], record: Mapping[str, Any], tolerance: Tolerance
) -> ReplayStage:
    problem = None
    for key, value in found.items():
        if key not in record:
            continue
        recorded = record[key]
        limit = tolerance.largest if is_maximum(key) else tolerance.metric
        if (value is None) != (recorded is None):
            problem = problem or f"{key}: recorded {recorded}, recomputed {value}"
        elif value is not None and not _is_close(value, recorded, limit):
            problem = problem or f"{key}: recorded {recorded:.9g}, recomputed {value:.9g}"
    shown = [f"{key} {value:.6g}" for key, value in found.items() if value is not None and key in record]
    return checked(name, problem, ", ".join(shown[:4]))


def _is_close(value: float, recorded: float, tolerance: float) -> bool:
    return abs(value - recorded) <= tolerance * max(1.0, abs(recorded))


def recorded_gradients(run_dir: Path, step: int) -> dict[str, Mapping[str, list[float]]]:
    """Return what the run has recorded of a step's gradients, by model."""
    lines = read_json_lines(step_file(run_dir / GRADIENTS, step))
    return {line["model"]: line["tensors"] for line in lines if line.get("step") == step}


def check_gradients(
    training: RecomputedTraining,
    batch: StepBatch,
    result: StepResult,
    *,
    record: Mapping[str, Any],
    recorded: Mapping[str, Mapping[str, list[float]]],
    tolerance: Tolerance,
) -> list[ReplayStage]:
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
            close = abs(norm - whole) <= 10 * tolerance.gradient * max(norm, 1e-12)
            text = f"norm: recorded {whole:.9g}, recomputed {norm:.9g}; its tensors are not recorded"
            stages.append(checked(name, None if close else text, text))
    return stages


class _Compared:
    """Compare the tensors of a model's gradient with their records."""

    def __init__(self, training: RecomputedTraining, batch: StepBatch, role: Role, result: StepResult) -> None:
        self._training, self._batch, self._role = training, batch, role
        self._gradients, self._sizes = result.gradients[role], result.sizes[role]
        self._norm = norm_of(self._gradients.values())

    def stage(self, name: str, recorded: Mapping[str, list[float]], tolerance: Tolerance) -> ReplayStage:
        """Return the stage; the run's rounding is looked at where a tensor differs by more than the tolerance."""
        if missing := sorted({*recorded} ^ {*self._gradients}):
            return checked(name, f"{missing[0]} is in one of recorded and recomputed gradients only", "")
        errors = {
            tensor: self._distance(
                tensor, _summary(self._gradients[tensor], tensor), torch.tensor(values, dtype=torch.float64)
            )
            for tensor, values in recorded.items()
        }
        where = max(errors, key=errors.__getitem__)
        whole, estimate = self._whole(recorded)
        figures = (
            f"norm {self._norm:.6g}; as one vector {whole:.2g} off (norm of the difference about {estimate:.2g}); "
        )
        figures += f"{count(len(recorded), 'tensor')}, largest relative difference {errors[where]:.2g} ({where})"
        if errors[where] <= tolerance.gradient and estimate <= tolerance.gradient:
            return checked(name, None, figures)
        rounding, of_whole = self._rounding()
        if tolerance.whole is not None and estimate > max(tolerance.gradient, tolerance.whole * of_whole):
            text = f"as one vector: norm of the difference about {estimate:.3g}, rounding explains {of_whole:.2g}"
            return checked(name, text, "")
        limits = {each: max(tolerance.gradient, tolerance.rounding * amount) for each, amount in rounding.items()}
        beyond = [each for each, error in errors.items() if not error <= limits[each]]
        if not beyond:
            return checked(
                name,
                None,
                f"{figures}, where the run's precision rounds by {rounding[where]:.2g}, of all {of_whole:.2g}",
            )
        first = max(beyond, key=errors.__getitem__)
        norm = float(self._gradients[first].norm())
        text = f"{first}: relative difference {errors[first]:.3g}, norm recorded {recorded[first][0]:.9g}"
        return checked(name, f"{text}, recomputed {norm:.9g}; rounding explains {rounding[first]:.2g}", "")

    def _whole(self, recorded: Mapping[str, list[float]]) -> tuple[float, float]:
        """Compare the gradient of all tensors as one vector, relative to its norm.

        Returns: the largest difference of the norm and of the signed sums over all elements; and the norm of the
            difference, estimated: a signed sum of the difference is the difference of signed sums, and the mean square
            of sums with random signs is the squared norm.
        """
        own = torch.stack([_summary(self._gradients[name], name) for name in recorded])
        its = torch.tensor([*recorded.values()], dtype=torch.float64)
        norms, of_sums = (each[:, 0].square().sum().sqrt() for each in (own, its)), (own - its)[:, 1:]
        one, other = norms
        largest = max(float((one - other).abs()), float(of_sums.sum(dim=0).abs().max()))
        estimate = float(of_sums.square().mean(dim=1).sum().sqrt())
        size = max(self._norm, 1e-30)
        return largest / size, estimate / size

    def _rounding(self) -> tuple[dict[str, float], float]:
        """Return the norm of each tensor's difference from that in the run's precision, relatively; and that of all.

        A signed sum of rounding errors, whose signs are random, is of the size of their norm.
        """
        rounded = self._training.rounded_gradient(self._role, self._batch)
        norms = {name: float((gradient - rounded[name]).norm()) for name, gradient in self._gradients.items()}
        whole = sum(norm**2 for norm in norms.values()) ** 0.5 / max(self._norm, 1e-30)
        return {
            name: norm / self._scale(name, float(self._gradients[name].norm())) for name, norm in norms.items()
        }, whole

    def _distance(self, name: str, one: Tensor, other: Tensor) -> float:
        return float((one - other).abs().max()) / self._scale(name, float(one[0]), float(other[0]))

    def _scale(self, name: str, *norms: float) -> float:
        return max(*norms, self._sizes[name], _SMALL * self._norm, 1e-30)


def _summary(gradient: Tensor, name: str) -> Tensor:
    """Return float64[1 + NUM_SUMS]: the norm, and the signed sums."""
    summary = summary_of(gradient, name, place_of(tuple(gradient.shape)))
    summary[0] = summary[0].sqrt()
    return summary


def check_update(
    before: Mapping[Role, Mapping[str, Tensor]],
    after: Mapping[Role, Mapping[str, Tensor]],
    directories: Mapping[Role, Path],
    tolerance: float,
) -> ReplayStage:
    """Compare the masters after the step with those of the step's checkpoint.

    Args:
        before: float32 masters before the step, of the trained models.
        after: after the recomputed step.
        directories: of the checkpoint that the run wrote after the step.
        tolerance: of the updates.
    """
    worst, where = 0.0, ""
    for role, masters in after.items():
        saved = _saved_masters(directories[role])
        if missing := sorted({*masters} - {*saved}):
            raise ConfigError(f"{directories[role]}: has no {missing[0]}")
        size = norm_of(masters[name] - before[role][name] for name in masters)
        difference = norm_of(saved[name].float() - masters[name] for name in masters)
        error = difference / max(size, 1e-30) if difference else 0.0
        if not error <= worst:  # True for NaN
            worst = error if isfinite(error) else inf
            where = f"{role} moved by {size:.3g} in norm, and is {difference:.3g} off"
    text = f"weights after the step: relative difference of the update {worst:.2g}"
    return checked("update", None if worst <= tolerance else f"{text} ({where})", text)


def _saved_masters(directory: Path) -> dict[str, Tensor]:
    """Return what a checkpoint's optimizer updates: weights, or where they are rounded, the masters beside them."""
    weights, masters = dict[str, Tensor](), dict[str, Tensor]()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118, no mapping
                kind, _, name = key.rpartition("/")
                if kind == MASTER:
                    masters[name] = file.get_tensor(key)
                elif not kind:
                    weights[key.removeprefix(PREFIX)] = file.get_tensor(key)
    return weights | masters
