"""Be a rank of a training session in several layouts, and record what it computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coati_rl.tinker.core import AdamStep, ModelSpec
from consumer.tenants.rank import TenantRank
from tests.tenants import LOSSES, make_rank, request, whole_gradients

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"num_trainers": 2},
    "tp2": {"num_trainers": 2, "tensor_parallel_size": 2},
    "fsdp2": {"num_trainers": 2, "plugin": "fsdp2"},
    "fsdp2_tp2": {"num_trainers": 2, "plugin": "fsdp2", "tensor_parallel_size": 2},
}
STEP = AdamStep(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)
STEPS = (STEP, STEP, replace(STEP, learning_rate=1e-3, grad_clip_norm=0.0))
# With Adam's eps far below the rounding of a gradient, an element of only rounding would move by the learning rate.
WHOLE_STEPS = tuple(replace(each, eps=1e-3) for each in STEPS)
SPECS = {"a": ModelSpec(rank=4, seed=1), "b": ModelSpec(rank=4, seed=2), "c": ModelSpec(rank=2, seed=3)}


def take(rank: int, out_dir: Path, model_dir: Path, start: Path) -> None:
    for name, layout in LAYOUTS.items():
        tenant = make_rank(model_dir, **layout)
        found = {
            "gradients": {loss: gradients_of(tenant, start, loss) for loss in LOSSES},
            "several": gradients_of(tenant, start, "cross_entropy", width=3),
            "adapters": steps_of(tenant, start, out_dir / f"{name}-adapters"),
            "whole": whole_steps_of(tenant, out_dir / f"{name}-whole"),
            "isolated": [isolated(tenant, model) for model in SPECS],
        }
        torch.save(found, out_dir / f"{name}-rank{rank}.pt")
        tenant.close()
        dist.barrier()


def gradients_of(tenant: TenantRank, start: Path, loss: str, **options: Any) -> tuple[Any, Any]:
    assert tenant.load("a", start, False) == ""
    results = tenant.forward_backward([request("a", 1, loss, **options)])
    gradients = whole_gradients(tenant._base.sets["a"])
    return results, {name: each.clone() for name, each in gradients.items()}


def steps_of(tenant: TenantRank, start: Path, directory: Path) -> list[float]:
    """Three steps of two requests each; the last after a load of what was saved."""
    tenant.load("a", start, False)
    norms = []
    for number, step in enumerate(STEPS):
        for part in (0, 1):
            tenant.forward_backward([request("a", 10 * number + part, "importance_sampling")])
        norms.append(tenant.optim_step("a", step))
        tenant.save("a", directory, True)
        assert tenant.load("a", directory, True) == ""
    return norms


def whole_steps_of(tenant: TenantRank, directory: Path) -> list[float]:
    tenant.create("w", ModelSpec(rank=0))
    norms = []
    for number, step in enumerate(WHOLE_STEPS):
        tenant.forward_backward([request("w", number, LOSSES[number + 3])])
        norms.append(tenant.optim_step("w", step))
        tenant.save("w", directory, True)
        assert tenant.load("w", directory, True) == ""
    tenant.drop("w")
    return norms


def isolated(tenant: TenantRank, model: str) -> bool:
    """Whether the model has the same bits alone as among the others."""

    def run(models: list[str]) -> dict[str, torch.Tensor]:
        for each in models:
            tenant.create(each, SPECS[each])
        for number in range(2):
            requests = [request(each, number, "ppo", lengths=(3 + 20 * ord(each) % 41, 9, 30)) for each in models]
            tenant.forward_backward(requests)
            for each in models:
                tenant.optim_step(each, STEP)
        return tenant._base.sets[model].full(with_moments=True)

    alone, among = run([model]), run([*SPECS])
    return all(torch.equal(among[name], each) for name, each in alone.items())
