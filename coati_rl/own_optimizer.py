"""Load an optimizer or a learning rate schedule of the user's own, and try it out before anything starts.

An optimizer is made by `make(parameters: list[Tensor], *, lr: float) -> torch.optim.Optimizer`. A trainer may hold a
part of a parameter only; an optimizer that treats every element alone says so with the attribute
`make.is_elementwise = True`. A schedule maps progress in [0, 1] to a factor of the learning rate.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coati_rl.config.optimizer import SCHEDULE_NAMES, OptimizerConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.plugins import is_plugin, load_function

MakeOptimizer = Callable[..., torch.optim.Optimizer]
Schedule = Callable[[float], float]

_LR = 1e-3
_ROUNDING = 1e-9  # of a schedule's factor: one of 0 may come out below it, which is no reason to end a run


def check_own_functions(config: TrainingConfig) -> None:
    """Load and try out what the settings of the optimizer name. Raises: ConfigError."""
    optimizer = config.optimizer
    if optimizer.lr_schedule not in SCHEDULE_NAMES:
        load_schedule(optimizer.lr_schedule)
    if not is_plugin(optimizer.optimizer):
        return
    make = load_optimizer(optimizer)
    cuts = _flags_that_cut(config)
    if cuts and not getattr(make, "is_elementwise", False):
        raise ConfigError(
            f"--optimizer {optimizer.optimizer} with {cuts}: a trainer then updates parts of parameters; if that makes "
            f"no difference, set the function's attribute is_elementwise = True, else leave out {cuts}"
        )


def load_schedule(name: str) -> Schedule:
    """Load a schedule, which is checked in hundredths of the run, and again at each progress that it is asked for.

    Raises: ConfigError, as the schedule does, if it fails, or does not return a finite factor that is not negative.
    """
    schedule: Schedule = load_function(name, flag="--lr-schedule")

    def checked(progress: float) -> float:
        try:
            factor = float(schedule(progress))
        except Exception as error:
            raise ConfigError(
                f"--lr-schedule {name}: fails at progress {progress:g}: {type(error).__name__}: {error}; it maps "
                "progress in [0, 1] to a factor of --learning-rate"
            ) from error
        if not (math.isfinite(factor) and factor >= -_ROUNDING):
            raise ConfigError(
                f"--lr-schedule {name}: returns {factor:g} at progress {progress:g}; return a finite factor of "
                "--learning-rate, at least 0"
            )
        return max(factor, 0.0)

    for hundredths in range(101):
        checked(hundredths / 100)
    return checked


def load_optimizer(config: OptimizerConfig) -> MakeOptimizer:
    """Load the function that makes the optimizer, after trying it on two tensors.

    Raises: ConfigError if it fails, if it cannot be resumed from the state that a checkpoint holds, or if it says that
        it is elementwise and is not.
    """
    name = config.optimizer
    make: MakeOptimizer = load_function(name, flag="--optimizer")
    try:
        problem = _problem_of(make)
    except Exception as error:
        raise ConfigError(
            f"--optimizer {name}: fails on two tensors: {type(error).__name__}: {error}; it is called as "
            "make(parameters: list[Tensor], *, lr: float) and returns a torch.optim.Optimizer, whose step() takes no "
            "closure"
        ) from error
    if problem:
        raise ConfigError(f"--optimizer {name}: {problem}")
    return make


def _flags_that_cut(config: TrainingConfig) -> str:
    """Return the flags by which a trainer holds parts of parameters; empty if it holds them whole."""
    parallel = config.parallel
    dp = parallel.num_trainers // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    cuts = {
        f"-tp {parallel.tensor_parallel_size}": parallel.tensor_parallel_size > 1,
        f"-zero {parallel.zero_stage}": parallel.zero_stage > 0 and dp > 1,
        "--plugin fsdp2": parallel.plugin == "fsdp2" and config.fsdp_ranks > 1,
    }
    return " ".join(flag for flag, is_given in cuts.items() if is_given)


def _problem_of(make: MakeOptimizer) -> str | None:
    """Return why an optimizer cannot be used; None if it can."""
    whole = _tensors()
    optimizer: Any = make(whole, lr=_LR)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"returns a {type(optimizer).__name__}; return a torch.optim.Optimizer"
    held = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
    if sorted(held) != sorted(map(id, whole)):
        return f"updates {len(held)} of {len(whole)} parameters; put each of them into one parameter group"
    before = [_settings(group) for group in optimizer.param_groups]
    _step(optimizer, whole, seed=1)
    if problem := _state_problem(optimizer, whole):
        return problem
    for old, new in zip(before, map(_settings, optimizer.param_groups), strict=True):
        changed = [name for name in new if new[name] != old.get(name)]
        if changed:
            return f"keeps {', '.join(changed)} in its parameter groups, which are not saved; keep it in its state"
    resumed = [tensor.detach().clone().requires_grad_() for tensor in whole]
    other = make(resumed, lr=_LR)
    for tensor, copy in zip(whole, resumed, strict=True):
        if state := optimizer.state.get(tensor):
            other.state[copy] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    _step(optimizer, whole, seed=2)
    _step(other, resumed, seed=2)
    if not all(map(torch.equal, whole, resumed)):
        return "goes on differently when its state is loaded again; keep all of it in its state, by parameter"
    if getattr(make, "is_elementwise", False) and not _is_elementwise(make, whole):
        return "has is_elementwise, but updates a part of a tensor differently; remove that attribute"
    return None


def _state_problem(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> str | None:
    for parameter in parameters:
        for name, value in optimizer.state.get(parameter, {}).items():
            is_number = value is None or isinstance(value, bool | int | float)
            if not is_number and not isinstance(value, Tensor):
                return f"its state {name} is a {type(value).__name__}; only tensors and numbers are saved"
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                return (
                    f"its state {name} has the shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}; "
                    "only state of the parameter's shape, and single numbers, are saved"
                )
            if "/" in str(name):
                return f"its state {name} has a slash in its name"
    return None


def _is_elementwise(make: MakeOptimizer, expected: Sequence[Tensor]) -> bool:
    """Return True if two steps on rows of the first tensor alone are those on the whole of it."""
    first, second = _tensors()
    parts = [first.detach()[:1].clone(), first.detach()[1:].clone(), second]
    parts = [part.requires_grad_() for part in parts]
    optimizer = make(parts, lr=_LR)
    for seed in (1, 2):
        gradients = _gradients(seed)
        for part, gradient in zip(parts, (gradients[0][:1], gradients[0][1:], gradients[1]), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
    found = [torch.cat([part.detach() for part in parts[:2]]), parts[2].detach()]
    return all(torch.allclose(a, b.detach(), rtol=1e-5, atol=1e-7) for a, b in zip(found, expected, strict=True))


def _step(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], *, seed: int) -> None:
    for tensor, gradient in zip(tensors, _gradients(seed), strict=True):
        tensor.grad = gradient
    optimizer.step()


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((4, 3), (5,))]


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,))]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of a parameter group."""
    return {name: value for name, value in group.items() if isinstance(value, str | bool | int | float | tuple)}
