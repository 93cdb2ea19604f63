"""Hold one rank of a training session: the frozen base with many models' adapters, and whole models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from coati_rl.checkpoint.directory import load_state
from coati_rl.checkpoint.saved_adapter import recorded_base
from coati_rl.config.plan import resolve_dtype
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import CollectiveError, ConfigError, EngineError
from coati_rl.model_files.adapter_files import is_adapter, read_adapter
from coati_rl.tinker.core import AdamStep, LossRequest, ModelSpec
from consumer.adapters.adapters import read_start
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, trained
from consumer.chosen_parallelism import own_parallelism
from consumer.jobs.job import backend_config
from consumer.joined_rank import TIMEOUT_S, JoinedRank
from consumer.objectives.tinker_losses import tinker_loss
from consumer.parallel.parallelism import Parallelism
from consumer.saving import identity_in_background
from consumer.tenants.adapter_checkpoint import layers_of, read_moments, write_adapters
from consumer.tenants.frozen_base import FrozenBase
from consumer.tenants.pieces import cut, shares
from consumer.tenants.results import RankResults
from consumer.tenants.whole_model import OPTIMIZER, WholeModel


class TenantRank(JoinedRank):
    """Compute this rank's share of all models' requests; methods are collective over the ranks."""

    _settings: BackendConfig
    _parallelism: Parallelism
    _base: FrozenBase
    _max_tokens: int

    def build(self, config: TrainingConfig, max_tokens: int) -> None:
        """Load the base.

        Args:
            config: whose layout has as many ranks as torch's default process group; one without such a group.
            max_tokens: of a pass, padding included.
        """
        directory = Path(config.model.model)
        self._max_tokens = max_tokens
        dtype = resolve_dtype(config, self.kind)
        self._settings = backend_config(config, {"policy": trained(directory, OPTIMIZER)}, dtype=dtype)
        self._parallelism = own_parallelism(self._settings, device=self.device, timeout_s=TIMEOUT_S)
        self._base = FrozenBase(directory, self._parallelism, precision=self._settings.precision, max_tokens=max_tokens)
        self._identity = identity_in_background(directory)
        self._whole = dict[str, WholeModel]()

    def create(self, model: str, spec: ModelSpec) -> None:
        """Add a model."""
        if spec.rank == 0:
            self._whole[model] = WholeModel(Backend(self._settings, self._parallelism))
            return
        adapters, layers = self._base.spec_of(spec)
        self._base.add(model, adapters, layers, spec.seed, {})

    def forward_backward(self, requests: Sequence[LossRequest]) -> dict[str, Any]:
        """Compute requests, and add up gradients of those that want them.

        Returns: "logprobs": lists of request, sequence, float32[N * K] in nats; "losses": of request, summed loss; of
            this rank's sequences.
        """
        results = RankResults()
        layout = self._parallelism.layout
        pieces: dict[bool, list[Any]] = {True: [], False: []}  # by whether they want a gradient
        for number, request in enumerate(requests):
            loss = tinker_loss(request.loss, request.settings)
            chosen = shares(request.data, layout.dp_size)[layout.dp_rank]
            found = cut(request, number, chosen, loss, max_tokens=self._max_tokens)
            wants_gradient = not request.is_forward_only
            if (whole := self._whole.get(request.model)) is not None:
                whole.compute(found, wants_gradient=wants_gradient, results=results)
            else:
                pieces[wants_gradient] += found
        for wants_gradient, found in pieces.items():
            self._base.compute(found, wants_gradient=wants_gradient, results=results)
        return {"logprobs": results.logprobs, "losses": results.losses}

    def optim_step(self, model: str, step: AdamStep) -> float | None:
        """Take a model's step. Returns: the gradient's norm; None if it is not finite, and no step was taken."""
        trained_model = self._whole.get(model) or self._base.sets[model]
        try:
            return trained_model.step(step)
        except CollectiveError:
            raise
        except EngineError:
            return None

    def save(self, model: str, directory: Path, with_optimizer: bool) -> None:
        """Write a model's checkpoint."""
        if (whole := self._whole.get(model)) is not None:
            whole.save(directory, with_optimizer=with_optimizer)
            return
        adapters = self._base.sets[model]
        tensors = adapters.full(with_moments=with_optimizer)

        def write() -> None:
            write_adapters(
                directory,
                tensors,
                peft=adapters.spec.as_peft(
                    base=str(self._settings.models["policy"].directory),
                    has_scalar_head=False,
                    targets=adapters.spec.targets,
                ),
                base=self._identity.result(),
                num_steps=adapters.num_steps,
                with_optimizer=with_optimizer,
            )

        self._parallelism.agree(write if self._parallelism.layout.sender == 0 else None)

    def load(self, model: str, directory: Path, with_optimizer: bool) -> str:
        """Add or replace a model. Returns: why the checkpoint does not fit, empty if it does; the same on all ranks."""
        try:
            if is_adapter(directory):
                return self._load_adapters(model, directory, with_optimizer)
            return self._load_whole(model, directory, with_optimizer)
        except (ConfigError, OSError, ValueError, SafetensorError) as error:
            return f"{directory} cannot be loaded: {error}"

    def drop(self, model: str) -> None:
        """Free a model."""
        self._whole.pop(model, None)
        self._base.sets.pop(model, None)

    def close(self) -> None:
        """End the layout's process groups."""
        self._parallelism.close()

    def _load_adapters(self, model: str, directory: Path, with_optimizer: bool) -> str:
        where = str(directory)
        spec, layers = read_adapter(directory, where).spec, layers_of(directory)
        if spec.dropout or spec.saved_modules:
            return f"{where}: has dropout or modules that are trained in full; save it without them"
        try:
            start = read_start(directory, self._base.infos_of(layers, spec.rank))
        except KeyError as error:
            return f"{where}: {error.args[0]} is no linear layer of the base; load it with the base it was trained on"
        base = recorded_base(directory)
        if base is not None and base != self._identity.result():
            return f"{where}: is of another base, whose weights are {base}; load it with that one"
        moments = read_moments(directory) if with_optimizer else (0, {})
        if moments is None:
            return f"{where}: holds no optimizer state; load it without the optimizer"
        self._whole.pop(model, None)
        self._base.add(model, spec, layers, 0, start)
        if moments[0]:
            self._base.sets[model].load_moments(*moments)
        return ""

    def _load_whole(self, model: str, directory: Path, with_optimizer: bool) -> str:
        if with_optimizer and not any(directory.glob("optimizer*.safetensors")):
            return f"{directory}: holds no optimizer state; load it without the optimizer"
        num_steps = int(load_state(directory)["step"]) if with_optimizer else 0
        settings = replace(self._settings, models={"policy": trained(directory, OPTIMIZER)})
        backend = Backend(settings, self._parallelism)
        if _shapes(backend) != {info.name: info.shape for info in self._base.infos}:
            return f"{directory}: is of another architecture than the base; load it with its own base"
        whole = WholeModel(backend, num_steps)
        if num_steps:
            whole.restore(directory)
        self._base.sets.pop(model, None)
        self._whole[model] = whole
        return ""


def _shapes(backend: Backend) -> Mapping[str, tuple[int, ...]]:
    return {info.name: info.shape for info in backend.policy.infos}
