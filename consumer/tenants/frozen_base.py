"""Hold the one frozen base of all models that are sets of adapters, and compute their pieces in common passes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapted_layers import adapted_layers
from coati_rl.model_files.adapter_files import ALL_LINEAR, AdapterSpec
from coati_rl.model_files.config import read_config
from coati_rl.ops.host_copies import on_device
from coati_rl.tinker.core import ModelSpec
from consumer.adapters.adapters import layer_infos
from consumer.models.grouped_attention import sequence_groups
from consumer.models.loading import attention_of
from consumer.models.packed_attention import NAME
from consumer.models.policy_model import PolicyInput, Precision
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.parameters import ParameterInfo
from consumer.role_models import RoleModel
from consumer.tenants.adapter_set import AdapterSet
from consumer.tenants.head import TenantHead
from consumer.tenants.layers import TenantLayers, groups_of
from consumer.tenants.pieces import Piece, blank_piece, passes
from consumer.tenants.results import RankResults

ALPHA = 32.0  # of all adapters: their scale is alpha / rank


class FrozenBase:
    """Hold the base, its layers, and the models' adapters; methods are collective over the ranks unless noted."""

    def __init__(self, directory: Path, parallelism: Parallelism, *, precision: Precision, max_tokens: int) -> None:
        """Load and shard the base.

        Args:
            directory: of a Hugging Face model.
            parallelism: without pipeline stages.
            precision: of the base; adapters are float32.
            max_tokens: of a pass, padding included.
        Raises: ConfigError for a model whose rows would depend on each other.
        """
        self._names, self.head = _layers_of(directory)
        self._parallelism, self._max_tokens = parallelism, max_tokens
        self._model = RoleModel("policy", directory, parallelism, precision=precision)
        self._infos = {info.name: info for info in self._model.infos}
        self._layers = TenantLayers()
        self._layers.install(self._model.module, self._model.infos, self._names, parallelism.layout)
        self.sets = dict[str, AdapterSet]()

    @property
    def infos(self) -> tuple[ParameterInfo, ...]:
        """Return the parameters of the base; not collective."""
        return self._model.infos

    def spec_of(self, model: ModelSpec) -> tuple[AdapterSpec, list[str]]:
        """Return the adapters of a model, and the layers that have one; not collective."""
        layers = [name for name in self._names if (model.trains_attention if _is_attention(name) else model.trains_mlp)]
        layers += [self.head] if model.trains_head else []
        targets = tuple(sorted({name.rpartition(".")[2] for name in layers}))
        return AdapterSpec(rank=model.rank, alpha=ALPHA, targets=targets), layers

    def infos_of(self, layers: Sequence[str], rank: int) -> list[ParameterInfo]:
        """Return the factors of layers; not collective. Raises: KeyError for a name that is no linear layer.

        They are in the base's order, not in that of the names: the order of sums over them must be a new model's.
        """
        if unknown := [name for name in layers if name not in (*self._names, self.head)]:
            raise KeyError(unknown[0])
        ordered = [name for name in (*self._names, self.head) if name in layers]
        return [info for name in ordered for info in layer_infos(name, self._weight(name), rank)]

    def add(self, model: str, spec: AdapterSpec, layers: Sequence[str], seed: int, start: Mapping[str, Tensor]) -> None:
        """Add or replace a model. `start`: its factors, whole, by name; empty: new ones, drawn by the seed."""
        infos = self.infos_of(layers, spec.rank)
        self.sets[model] = AdapterSet(spec, infos, self._parallelism, seed=seed, start=start)

    def compute(self, pieces: Sequence[Piece], *, wants_gradient: bool, results: RankResults) -> None:
        """Compute this rank's pieces; every rank makes as many passes as the one with most."""
        own = passes(pieces, max_tokens=self._max_tokens)
        for number in range(self._parallelism.num_micro_batches(len(own))):
            of_pass = own[number] if number < len(own) else [blank_piece()]
            groups = groups_of(of_pass, [self.sets.get(piece.model) for piece in of_pass])
            ordered = [piece for group in groups for piece in group.pieces]
            head = TenantHead(groups, self.head)
            with one_thread(self._parallelism.device), self._layers.computing(groups):
                inputs = self._input(ordered, head)
                if wants_gradient:
                    self._model.accumulate([inputs])
                else:
                    self._model.score([inputs])
            for each in head.results:
                results.add(each.piece, each.logprobs, float(each.loss))

    def _input(self, pieces: Sequence[Piece], head: TenantHead) -> PolicyInput:
        device = self._parallelism.device
        lengths = [piece.lengths for piece in pieces]
        if device.type == "cpu":
            lengths = [tuple(length for each in lengths for length in each)]
        positions = np.concatenate([np.arange(length) for each in lengths for length in each])
        token_ids = np.concatenate([piece.token_ids for piece in pieces])
        return PolicyInput(
            token_ids=on_device(torch.from_numpy(token_ids)[None], device),
            position_ids=on_device(torch.from_numpy(positions)[None], device),
            loss_arrays={"trainer_version": torch.full((), -1)},
            groups=sequence_groups(lengths, device),
            after_hidden=head,
        )

    def _weight(self, layer: str) -> ParameterInfo:
        """Return the description of a layer's weight; of a tied head it is the embedding's."""
        found = self._infos.get(f"{layer}.weight")
        if found is None:
            names = {id(module): name for name, module in self._model.module.named_modules()}
            embedding: object = self._model.module.get_input_embeddings()
            found = self._infos[f"{names[id(embedding)]}.weight"]
        return found


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on a CPU with one thread.

    Threads share out the elements of all pieces: where one's part ends, a few elements are computed without vectors,
    by other functions, and which they are depends on the number of pieces.
    """
    number = torch.get_num_threads()
    if device.type != "cpu" or number == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _layers_of(directory: Path) -> tuple[list[str], str]:
    """Return the names of a model's linear layers and of its head. Raises: ConfigError if it has others, too."""
    where = f"--model {directory}"
    config = read_config(directory, where)
    if attention_of(config) != NAME:
        raise ConfigError(f"{where}: the attention of {config.model_type} does not keep packed samples apart")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [*adapted_layers(model, (ALL_LINEAR,))]
    others = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [name for name, each in model.named_parameters() if each.dim() > 1 and id(each) not in others]
    if unknown := [name for name in matrices if name.removesuffix(".weight") not in names]:
        raise ConfigError(f"{where}: {unknown[0]} is not the weight of a linear layer; give a dense model of this kind")
    return names, next(name for name, module in model.named_modules() if module is model.get_output_embeddings())


def _is_attention(layer: str) -> bool:
    return any("attn" in part or "attention" in part for part in layer.split("."))
