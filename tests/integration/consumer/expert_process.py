"""Run a trainer that takes a step with the loss that balances experts, and records gradients and metrics."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.integration.consumer.conftest import EVERY_LAYOUT, reference_of
from tests.integration.consumer.expert_models import CLIPPED
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.gradient_process import StepRecorder, take_whole_step
from tests.integration.consumer.lifecycle_process import make, resume, state_of, train
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.trainer import make_trainer

CPU = torch.device("cpu")
COEFF = 5.0  # large enough that its gradient is not small beside the other


class Balanced(NamedTuple):
    """A step of a model in a layout, with the balancing loss or without."""

    model: str
    layout: str
    cut: Cut
    recomputes: bool = False
    coeff: float = COEFF

    @property
    def name(self) -> str:
        return "-".join(str(each) for each in (self.model, self.layout, *self.cut, self.recomputes, self.coeff))


def take_balanced(rank: int, out_dir: Path, model_root: Path, trials: list[Balanced]) -> None:
    for trial in trials:
        torch.save(taken(trial, model_root), out_dir / f"{trial.name}-rank{rank}.pt")


def taken(trial: Balanced, model_root: Path) -> dict[str, Any]:
    reference = reference_of(model_root / trial.model)
    settings = {"balancing_coeff": trial.coeff, "gradient_checkpointing": trial.recomputes, "reference_dir": reference}
    if dist.is_initialized():
        backend = make_trainer(model_root / trial.model, **settings, **EVERY_LAYOUT[trial.layout][1])
    else:
        backend = Backend(backend_config(model_root / trial.model, **settings), SingleProcess(device=CPU))
    recorder = StepRecorder(backend)
    take_whole_step(recorder, model_root / trial.model, CASES[CLIPPED], trial.cut, 0)
    parameters = backend.policy.parameters
    whole = {name: parameters.full_state(name, each) for name, each in recorder.taken["gradients"].items()}
    metrics = backend.router_metrics()
    backend.close()
    return {"gradients": whole, "metrics": metrics}


def save_after_a_step(rank: int, out_dir: Path, model_dir: Path, layout: str) -> None:
    """Save a checkpoint, and the float32 weights before and after the step that follows it."""
    backend = make(model_dir, layout, "fp32")
    train(backend, 0)
    backend.save(out_dir / "step-1", state={"step": 1})
    torch.save(state_of(backend)["masters"], out_dir / f"saved-rank{rank}.pt")
    train(backend, 1)
    torch.save(state_of(backend)["masters"], out_dir / f"uninterrupted-rank{rank}.pt")
    backend.close()


def resume_in(rank: int, out_dir: Path, saved: Path, layout: str) -> None:
    """Save what was restored, and record the weights after the next step."""
    _, state = resume(saved, layout, "fp32", again=out_dir / "step-1")
    torch.save(state["masters"], out_dir / f"state-rank{rank}.pt")
