"""Record what a replay compares the gradient of each optimizer step with: norm and sketch of each tensor.

A line of <run-dir>/gradients/steps-000001-000100.jsonl is one trained model's gradient of one step, scaled to the mean
loss and not clipped (docs/replay.md). The recorder only reads gradients, between their sum over ranks and the step.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coati_rl.disk import disk_errors
from coati_rl.observability.step_files import GRADIENTS, delete_before, step_file
from coati_rl.ops.gradient_sketch import NUM_SUMS, summary_of

if TYPE_CHECKING:
    from consumer.parallel.parallelism import Parallelism
    from consumer.role_models import RoleModel


class GradientRecorder:
    """Summarise gradients on every rank, and write them on one; methods are collective."""

    def __init__(self, run_dir: Path, parallelism: "Parallelism", *, is_writer: bool, keep: int) -> None:
        """Store the arguments; `keep`: steps that are kept at least. Nothing is written before the first step."""
        self._directory = run_dir / GRADIENTS
        self._parallelism = parallelism
        self._is_writer, self._keep = is_writer, keep
        self._lines = list[dict[str, Any]]()  # of the step

    def observe(self, model: "RoleModel", loss_scale: float) -> None:
        """Take a model's gradient once it is summed over ranks. `loss_scale`: factor to that of the mean loss."""
        parameters, names = model.parameters, [info.name for info in model.saved_infos]
        sums = torch.zeros(len(names), 1 + NUM_SUMS, dtype=torch.float64, device=self._parallelism.device)
        for row, name in enumerate(names):
            gradient = model.gradients.get(name)
            if gradient is not None and parameters.counts_in_norm(name):
                sums[row] = summary_of(gradient, name, parameters.place(name))
        sums = self._parallelism.add_over_ranks(sums).cpu()
        norms, sketches = sums[:, :1].sqrt() * loss_scale, sums[:, 1:] * loss_scale
        rows = torch.cat([norms, sketches], dim=1).tolist()
        tensors = {name: [float(f"{value:.9g}") for value in row] for name, row in zip(names, rows, strict=True)}
        self._lines.append({"model": model.role, "tensors": tensors})

    def write(self, step: int) -> None:
        """Append what was observed for an optimizer step, from 1. Raises: RunError if it cannot be written."""
        lines, self._lines = self._lines, []
        if not self._is_writer:
            return
        path = step_file(self._directory, step)
        with disk_errors(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **line}) + "\n" for line in lines)
            delete_before(self._directory, step, keep=self._keep)
