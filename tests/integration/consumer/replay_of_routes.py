"""Make routes for the samples of the gradient tests, and run trainers that replay them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from coati_rl.batching.packing import pack, padded
from coati_rl.routes import unknown_routes
from coati_rl.samples import Sample as PackageSample
from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.integration.consumer.conftest import EVERY_LAYOUT, reference_of
from tests.integration.consumer.expert_models import CLIPPED
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.gradient_process import StepRecorder, take_step
from tests.integration.consumer.samples import Sample, plain_model, samples_near, scale_of, to_mini_batch
from tests.integration.consumer.shared_samples import converted_sample
from tests.integration.consumer.trainer import make_trainer, whole_tensors

CPU = torch.device("cpu")
UNKNOWN_SHARE = 0.2
CASE = CASES[CLIPPED]


class Replayed(NamedTuple):
    """A step of a model in a layout, whose routes are replayed or measured alone."""

    model: str
    layout: str = "dp1"
    packed: bool = True
    shared: bool = False
    mode: str = "rollout"
    recomputes: bool = False
    coeff: float = 0.0
    precision: str = "fp32"

    @property
    def unknown_share(self) -> float:
        """Routers that round choose otherwise: in bfloat16 all routes are known."""
        return UNKNOWN_SHARE if self.precision == "fp32" else 0.0

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def routes_for(config: Any, token_ids: np.ndarray, unknown_share: float) -> np.ndarray:
    """uint8[T, D, K] that tokens and layer decide alone, so that a shared prefix has the same."""
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    routes = unknown_routes(len(token_ids), (config.num_hidden_layers, config.num_experts_per_tok), np.dtype(np.uint8))
    for place in range(len(token_ids)):
        for layer in range(config.num_hidden_layers):
            rng = np.random.default_rng([layer, *token_ids[: place + 1].tolist()])
            if rng.random() >= unknown_share:
                routes[place, layer] = rng.choice(num_experts, config.num_experts_per_tok, replace=False)
    return routes


def samples_of(model_dir: Path) -> tuple[Sample, ...]:
    return samples_near(model_dir, 0, recomputes_old=CASE.recomputes_old, kind=CASE.kind)


def with_routes(sample: Sample, number: int, config: Any, unknown_share: float) -> PackageSample:
    converted = converted_sample(sample, number, CASE.aggregation)
    fields = {name: getattr(converted, name) for name in ("uid", "prefix_ids", "token_ids", "loss_mask", "arrays")}
    routes = routes_for(config, sample.token_ids, unknown_share)
    routes[-1] = unknown_routes(1, routes.shape[1:], routes.dtype)  # the last token passes no engine
    return PackageSample(number=number, routes=routes, **fields)


def take_replayed(rank: int, out_dir: Path, model_root: Path, trials: list[Replayed]) -> None:
    for trial in trials:
        torch.save(replayed(trial, model_root / trial.model), out_dir / f"{trial.name}-rank{rank}.pt")


def replayed(trial: Replayed, model_dir: Path) -> dict[str, Any]:
    """Gradients, metrics and float32 weights of a step, and this rank's scores before it."""
    settings = {
        "balancing_coeff": trial.coeff,
        "router_replay": trial.mode,
        "reference_dir": reference_of(model_dir),
        "precision": trial.precision,
        "gradient_checkpointing": trial.recomputes,
    }
    if dist.is_initialized():
        backend = make_trainer(model_dir, **settings, **EVERY_LAYOUT[trial.layout][1])
    else:
        backend = Backend(backend_config(model_dir, **settings), SingleProcess(device=CPU))
    samples, config = samples_of(model_dir), plain_model(model_dir).config
    ranks = pack(
        [with_routes(sample, number, config, trial.unknown_share) for number, sample in enumerate(samples)],
        max_samples=3,
        num_ranks=backend.layout.num_data_ranks,
        shares_prefixes=trial.shared,
        one_sample_per_row=not trial.packed,
    )
    count = max(map(len, ranks))
    own = padded(ranks[backend.layout.data_rank], count)
    scores = backend.score(own)
    recorder = StepRecorder(backend)
    take_step(recorder, CASE, [to_mini_batch(own, step=0, scale=scale_of(samples, CASE.aggregation))])
    parameters = backend.policy.parameters
    gradients = {name: parameters.full_state(name, each) for name, each in recorder.taken["gradients"].items()}
    masters = whole_tensors(backend, backend.policy.masters())
    metrics = backend.router_metrics()
    backend.close()
    return {"gradients": gradients, "masters": masters, "metrics": metrics, "scores": scores}
