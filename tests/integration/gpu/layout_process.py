"""Run a trainer on a GPU or the CPU that takes two steps in some layouts, and records whole gradients and weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.types import Device
from consumer.backend import Backend, make_backend
from consumer.parallel import gradient_reduction
from tests.backends import backend_config
from tests.integration.consumer.conftest import LAYOUTS, MAX_GRAD_NORM, WEIGHT_DECAY, reference_of
from tests.integration.consumer.gradient_process import steps_of
from tests.integration.consumer.losses import LOSSES, Cut
from tests.integration.consumer.trainer_server import TIMEOUT_S


class Case(NamedTuple):
    """A layout in a precision, with samples that share prefixes or do not."""

    layout: str
    precision: str
    is_shared: bool
    compile_ops: bool | None = None  # None: on a GPU

    def file(self, device: str, rank: int) -> str:
        return f"{'-'.join(map(str, self))}-{device}-{rank}.pt"


def make(model_dir: Path, case: Case, device: Device) -> Backend:
    config = backend_config(
        model_dir,
        reference_dir=reference_of(model_dir),
        precision=case.precision,
        compile_ops=case.compile_ops,
        optimizer=OptimizerConfig(max_grad_norm=MAX_GRAD_NORM, weight_decay=WEIGHT_DECAY),
        **LAYOUTS[case.layout][1],
    )
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return make_backend(config, device=place, timeout_s=TIMEOUT_S)


def take_steps(rank: int, out_dir: Path, model_dir: Path, cases: Sequence[Case], device: Device) -> None:
    gradient_reduction.BUCKET_ELEMENTS = 5000  # several buckets, some of several parameters
    for case in cases:
        backend = make(model_dir, case, device)
        whole, infos = backend.policy.parameters.full_state, backend.policy.parameters.infos
        steps = []
        for taken in steps_of(backend, model_dir, LOSSES["clip"], Cut(2, True, "several", case.is_shared)):
            gradients = {name: whole(name, taken["gradients"][name]).cpu() for name in infos}
            steps.append({"gradients": gradients, "norm": taken["norm"], "sums": taken["sums"]})
        weights = {name: weight.float().cpu() for name, weight in backend.export_weights()}
        torch.save({"steps": steps, "weights": weights}, out_dir / case.file(device, rank))
        backend.close()
