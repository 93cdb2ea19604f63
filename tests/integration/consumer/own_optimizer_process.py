"""Run trainers with optimizers of the user's own, and record the masters that their steps make."""

from pathlib import Path

import torch

from coati_rl.config.optimizer import OptimizerConfig
from consumer.backend import Backend
from tests.integration.consumer.conftest import LAYOUTS
from tests.integration.consumer.lifecycle_process import state_of, train
from tests.integration.consumer.trainer import make_trainer

OWN = """
import torch

def adamw(parameters, *, lr):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)

def momentum(parameters, *, lr):
    vectors = {"params": [p for p in parameters if p.dim() == 1], "lr": 3 * lr}
    return torch.optim.SGD([vectors, {"params": [p for p in parameters if p.dim() > 1]}], lr=lr, momentum=0.9)
"""
PRECISION = {True: "bf16", False: "fp32"}  # ZeRO shares out float32 masters of bfloat16 weights


def run(rank: int, directory: Path, layout: str) -> None:
    """Two steps with AdamW, built in and as a function; two with momentum, the second one also after a resume."""
    precision = PRECISION["zero" in layout]
    file = directory / "own.py"

    def make(model_dir: Path, name: str) -> Backend:
        function = name if name == "adamw" else f"{file}:{name.removeprefix('own ')}"
        optimizer = OptimizerConfig(optimizer=function, weight_decay_exempt="none")
        settings = {"optimizer": optimizer, "precision": precision, "tokenizer_dir": directory / "model"}
        return make_trainer(model_dir, **settings, **LAYOUTS[layout][1])

    found = {}
    for name in ("adamw", "own adamw", "own momentum"):
        backend = make(directory / "model", name)
        train(backend, 0)
        if name == "own momentum":
            backend.save(directory / layout / "step-1", state={})
        train(backend, 1)
        found[name] = state_of(backend)["masters"]
        backend.close()
    resumed = make(directory / layout / "step-1", "own momentum")
    resumed.restore(directory / layout / "step-1")
    train(resumed, 1)
    found["resumed"] = state_of(resumed)["masters"]
    resumed.close()
    torch.save(found, directory / layout / f"rank{rank}.pt")
