"""Train many models on one frozen base by ordered requests: the training core of a server of Tinker's API.

The requests are those of `coati_rl.tinker.core.TrainingCore`. The ranks are this process, or those of a cluster.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coati.settings import device_of, trainer_config
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.members import Members
from coati_rl.model_files.config import read_config
from coati_rl.tinker.core import AdamStep, LossRequest, LossResult, ModelSpec, RequestError
from consumer.parallel.own_member import OwnMember, join_torchrun
from consumer.tenants.pieces import check_request
from consumer.tenants.rank import TenantRank

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster

# Of a forward and backward, padding included: more of them save calls on a GPU, and leave a CPU's cache.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}


class TrainingSession:
    """Implement `TrainingCore` with the ranks of a trainer, in any layout without pipeline stages."""

    def __init__(
        self,
        model: str | Path,
        *,
        on: "Cluster | None" = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        pass_tokens: int | None = None,
        **flags: Any,
    ) -> None:
        """Prove the base, and load it.

        Args:
            model: directory, or hub id.
            on: a cluster, over whose trainers the base is laid out; None: this process, or all of torchrun.
            device: of this process.
            pass_tokens: of a forward and backward, padding included; a longer sequence is alone in one;
                None: the device's.
            flags: of `coati-rl sft` for the layout: plugin, tensor_parallel_size, precision.
        Raises: ConfigError.
        """
        asked = build_job(flags, OFFLINE["sft"])
        for name in ("pipeline_parallel_size", "context_parallel_size"):
            if (size := asked.setting(name, 1)) != 1:
                raise ConfigError(f"{name}={size}: a training session computes whole layers and rows; leave it out")
        kind = device_of(device) if on is None else on.device
        own = join_torchrun(kind) if on is None else None
        num_ranks = on.num_trainers if on is not None else _world_size()
        config = trainer_config(model, "sft", num_trainers=num_ranks, device=kind, **flags)
        directory = Path(config.model.model)
        hf_config = read_config(directory, f"--model {directory}")
        self.max_tokens, self.vocab_size = int(hf_config.max_position_embeddings), int(hf_config.vocab_size)
        self._dp = config.dp
        members: Members = OwnMember(lambda: TenantRank(own)) if on is None else on.trainers(config, TenantRank)
        self._members = members
        self._each("build", config, pass_tokens or PASS_TOKENS[kind])
        self._models = set[str]()

    def create(self, model: str, spec: ModelSpec) -> None:
        if model in self._models:
            raise RequestError(f"model {model!r} is there already; use another name")
        if spec.rank < 0:
            raise RequestError(f"rank={spec.rank}: use 1 or more, or 0 to train all weights")
        if spec.rank and not (spec.trains_attention or spec.trains_mlp or spec.trains_head):
            raise RequestError("train_attn, train_mlp and train_unembed are all false: train at least one")
        self._each("create", model, spec)
        self._models.add(model)

    def check(self, request: LossRequest) -> None:
        self._known(request.model)
        check_request(request, max_tokens=self.max_tokens, vocab_size=self.vocab_size)

    def forward_backward(self, requests: Sequence[LossRequest]) -> list[LossResult | RequestError]:
        problems = [_problem(self.check, request) for request in requests]
        chosen = [request for request, problem in zip(requests, problems, strict=True) if problem is None]
        found = iter(self._computed(chosen) if chosen else ())
        return [next(found) if problem is None else problem for problem in problems]

    def optim_step(self, model: str, step: AdamStep) -> dict[str, float]:
        """See `TrainingCore`. Raises: RequestError if the gradient is not finite; it is cleared, without a step."""
        self._known(model)
        _check_step(step)
        found = self._each("optim_step", model, step)[0]
        if found is None:
            raise RequestError(
                "optim_step: the gradient is not finite, so that no step was taken and the gradient is cleared; lower "
                "learning_rate, or load the model's last checkpoint"
            )
        return {"grad_norm:mean": float(found)}

    def save(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        """See `TrainingCore`. Raises: RunError."""
        self._known(model)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._each("save", model, directory.absolute(), with_optimizer)

    def load(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        """See `TrainingCore`. An adapter of PEFT's, and a Hugging Face model of the base's shapes, can be loaded."""
        if not directory.is_dir():
            raise RequestError(f"{directory} is no directory; give a checkpoint that was saved")
        if problem := self._each("load", model, directory.absolute(), with_optimizer)[0]:
            raise RequestError(problem)
        self._models.add(model)

    def drop(self, model: str) -> None:
        self._each("drop", model)
        self._models.discard(model)

    def close(self) -> None:
        self._each("close")

    def __enter__(self) -> "TrainingSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _computed(self, requests: Sequence[LossRequest]) -> list[LossResult]:
        parts = self._each("forward_backward", requests)
        per_dp = len(parts) // self._dp
        logprobs: list[dict[int, np.ndarray]] = [{} for _ in requests]
        losses = [0.0] * len(requests)
        for part in parts[::per_dp]:
            for number, index, values in part["logprobs"]:
                targets = requests[number].data[index].inputs["target_tokens"]
                logprobs[number][index] = np.asarray(values, np.float32).reshape(targets.shape)
            for number, loss in part["losses"]:
                losses[number] += loss
        return [
            LossResult(logprobs=[each[index] for index in sorted(each)], metrics={"loss:sum": loss})
            for each, loss in zip(logprobs, losses, strict=True)
        ]

    def _known(self, model: str) -> None:
        if model not in self._models:
            raise RequestError(f"model {model!r} is unknown; create or load it first")

    def _each(self, method: str, *arguments: Any) -> list[Any]:
        return self._members.call(method, [arguments] * self._members.size)


def _problem(check: Callable[[LossRequest], None], request: LossRequest) -> RequestError | None:
    try:
        check(request)
    except RequestError as error:
        return error
    return None


def _check_step(step: AdamStep) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if not (np.isfinite(value := getattr(step, name)) and value >= 0):
            raise RequestError(f"{name}={value}: use a finite number of at least 0")
    if not step.eps:  # 0 / 0 where a gradient is 0, as that of an adapter's A in its first step
        raise RequestError("eps=0: use a number above 0, such as 1e-12")
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(step, name)) < 1:
            raise RequestError(f"{name}={value}: use a number from 0 up to, but not including, 1")


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1
