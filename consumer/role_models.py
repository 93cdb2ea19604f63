"""Own one model of a trainer in its role: load it, train or freeze it, export it, save its part of a checkpoint.

A trainer has several: the policy, which is trained; a reference, a teacher and the policy before the update ("old"),
which are frozen. `ShardedModel` knows how a model is sharded; here tensors are whole and have their Hugging Face names.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.config.model import RouterReplay
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.model_files.adapted_layers import FACTORS
from coati_rl.protocols import Role
from consumer.adapters.adapters import Adapters, AdapterSource
from consumer.adapters.lm_head import untie_lm_head
from consumer.checkpoint import CheckpointReader, CheckpointWriter, keep, taken
from consumer.model_memory import ModelMemory
from consumer.models.compiled_ops import CompiledOps
from consumer.models.loading import saved_buffers
from consumer.models.policy_model import DTYPES, HeadWeights, PolicyInput, Precision, load_policy
from consumer.models.routers import Routers
from consumer.models.scalar_head import ScalarHead, load_scalar
from consumer.optim.gradient_clipping import scale_and_clip, sum_of_squares
from consumer.optim.optimizer import make_optimizer, set_step, state_kinds
from consumer.optim.optimizer_state import check_kinds, pack_state, unpack_state
from consumer.optim.weight_decay import names_without_decay
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.parameters import ParameterInfo, describe_parameters


class RoleModel:
    """Own this rank's part of one model; methods are collective unless noted."""

    def __init__(
        self,
        role: Role,
        directory: Path,
        parallelism: Parallelism,
        *,
        precision: Precision,
        optimizer: OptimizerConfig | None = None,
        gradient_checkpointing: bool = False,
        compiles_ops: bool = False,
        head: ScalarHead | None = None,
        adapters: AdapterSource | None = None,
        balancing_coeff: float | None = None,
        router_replay: RouterReplay = "none",
    ) -> None:
        """Load and shard the model.

        Args:
            role: policy, reference, teacher or old policy; a teacher may be of another architecture and size.
            directory: Hugging Face model, or a checkpoint of ours.
            parallelism: shards the model and reduces its gradients.
            precision: bf16 keeps float32 master weights of a trained model.
            optimizer: optimizer settings; None: the model is frozen and has no optimizer.
            gradient_checkpointing: recompute activations in the backward pass; not of a frozen model.
            compiles_ops: compute by `compiled_ops`.
            head: scalar head; None: the LM head.
            adapters: trained in place of the model's weights; None: these are trained.
            balancing_coeff: of the loss that balances a mixture's experts; None: routers are not observed.
            router_replay: what these do with the engines' routes.
        Raises: ConfigError if the model cannot be read or cannot be sharded this way.
        """
        self.role, self._parallelism, self._optimizer = role, parallelism, optimizer
        self._has_scalar_head, self._keeps_masters = head is not None, precision == "bf16"
        is_recomputed = optimizer is not None and gradient_checkpointing
        # The Hugging Face module; after sharding, this rank's part of it.
        load = load_policy if head is None else partial(load_scalar, head=head)
        self.module = load(directory, dtype=DTYPES[precision], gradient_checkpointing=is_recomputed)
        if adapters is not None and adapters.takes_lm_head and head is None:
            untie_lm_head(self.module, adapters.spec.targets)
        self.saved_buffers = saved_buffers(self.module) if adapters is None else {}
        self.routers = Routers.attached(self.module, balancing_coeff, router_replay)
        self.infos = describe_parameters(self.module, parallelism.layout, parallelism.layers_per_stage(self.module))
        self.adapters = None if adapters is None else Adapters(self.module, self.infos, adapters)
        self.torch_optimizer = self._made_optimizer()
        factors = () if self.adapters is None else self.adapters.factor_infos
        attach = None if self.adapters is None else partial(self.adapters.attach, layout=parallelism.layout)
        self._sharded = parallelism.shard(self.module, (*self.infos, *factors), self.torch_optimizer, attach)
        self.parameters = self._sharded.parameters
        self.memory = ModelMemory(self.module, self.parameters, self.torch_optimizer)
        self._num_accumulated = 0  # since the last optimizer step
        self.gradients: dict[str, Tensor] = {}  # summed over all ranks, from `reduce_gradients` to the update
        if compiles_ops:
            compiled = CompiledOps(self.module, device=parallelism.device, dtype=DTYPES[precision])
            if not parallelism.sum_over_ranks(float(not compiled.are_right())):  # all ranks have the same bits
                compiled.use()

    def _made_optimizer(self) -> Any:
        """Return the optimizer of what is trained; None for a frozen model, whose weights need no gradient then."""
        if self._optimizer is None:
            self.module.requires_grad_(False)
            return None
        parameters = dict(self.module.named_parameters()) if self.adapters is None else self.adapters.parameters
        return make_optimizer(parameters, self._optimizer, without_decay=names_without_decay(self.module))

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """Return log-probabilities, a scalar head's values or hidden states without gradient; see `ShardedModel`."""
        with torch.no_grad(), self.memory.used("weights", "head"):
            return self._sharded.score(inputs)

    @contextmanager
    def head_weights(self) -> Iterator[HeadWeights | None]:
        """Provide the LM head's weights on ranks that compute with it; see `ShardedModel.head_weights`."""
        with self.memory.used("head"):
            yield self._sharded.head_weights()

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """Accumulate the gradient of the summed loss. Returns: the loss's reported sums; empty without the head.

        Raises: ValueError once the step's gradients are reduced.
        """
        if self.gradients:
            raise ValueError("the step's gradients are summed over all ranks: take the step first")
        if not inputs:
            return {}
        self._num_accumulated += 1
        with self._dropout(inputs[0]):
            sums = self._sharded.accumulate(inputs)
        self.routers.add(each.routing for each in inputs)
        return sums

    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over all ranks into `gradients`, once per optimizer step."""
        self.gradients = self.gradients or self._sharded.reduce_gradients()

    def masters(self) -> dict[str, Tensor]:
        """Return this rank's part of each float32 tensor that the optimizer updates, by name; not collective."""
        return self._sharded.masters()

    def optimizer_step(
        self,
        *,
        loss_scale: float,
        learning_rate: float,
        settings: OptimizerConfig | None = None,
        observe: "Callable[[RoleModel, float], None] | None" = None,
    ) -> float:
        """Sum the gradient over all ranks, scale it, clip it, step and clear it; with a scale of 0 only clear it.

        Args:
            loss_scale: factor from the summed loss to its mean.
            learning_rate, settings: of this step; None: clipping, weight decay and Adam's numbers as at the start.
            observe: is called with this model, whose `gradients` are summed, and the factor, before they are scaled.
        Returns: the scaled gradient's norm before clipping, the same on every rank.
        Raises: EngineError if the norm is not finite; the weights are unchanged then.
        """
        settings = settings or self._settings()
        if loss_scale > 0:
            self.reduce_gradients()
        if loss_scale > 0 and observe is not None:
            observe(self, loss_scale)
        counted = [gradient for name, gradient in self.gradients.items() if self.parameters.counts_in_norm(name)]
        squares = self._parallelism.sum_over_ranks(sum_of_squares(counted))
        gradients, max_norm = [*self.gradients.values()], settings.max_grad_norm
        norm = scale_and_clip(gradients, squares, loss_scale=loss_scale, max_norm=max_norm)
        if loss_scale > 0:
            set_step(self.torch_optimizer, settings, learning_rate)
            with self.memory.used("optimizer", changes=True):
                self._sharded.step(self.gradients)
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        """Clear what has been accumulated and summed; not collective."""
        self.gradients = {}
        self._num_accumulated = 0
        self._sharded.forget_gradients()

    @torch.no_grad()
    def move_to(self, other: "RoleModel", mix: float = 1.0) -> None:
        """Move the weights to (1 - mix) * own + mix * those of a model of the same architecture; not collective."""
        theirs = other.parameters.local
        with self.memory.used("weights", "head", changes=True):
            for name, weight in self.parameters.local.items():
                weight.copy_(theirs[name] if mix == 1 else torch.lerp(weight.float(), theirs[name].float(), mix))

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors of this pipeline stage by name, in the module's order, without a tied LM head.

        Collective over the ranks with dp_rank 0; yields nothing on the others. A tensor that needs neither cast nor
        gather is the live weight itself: use it before the next step.
        """
        if self._parallelism.layout.is_first_copy:
            for info in self._of_this_stage(self.infos):
                yield from info.saved.split(self._merged(info.name, dtype))

    @property
    def saved_infos(self) -> tuple[ParameterInfo, ...]:
        """Return the parameters that a checkpoint holds: all, or those that are trained beside adapters."""
        return self.infos if self.adapters is None else self.adapters.infos

    @property
    def peft(self) -> dict[str, Any] | None:
        """Return the contents of PEFT's adapter_config.json; None: the model has no adapters."""
        return None if self.adapters is None else self.adapters.as_peft(has_scalar_head=self._has_scalar_head)

    def write(self, writer: CheckpointWriter) -> dict[str, str]:
        """Write this rank's share of its pipeline stage's files; `writer` knows all parameters of the model.

        A file is written while the next ones are gathered; a rank holds the tensors of one file at a time.

        Returns: the digests of the files that this rank has written, by name.
        """
        digests, writing = dict[str, str](), set[Future[dict[str, str]]]()
        parts = self._parts(writer, before_own=lambda: wait(writing))
        used = self.memory.used("weights", "head", "optimizer")
        with used, ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            try:
                for part in parts:
                    digests |= taken(writing)
                    writing.add(pool.submit(writer.write, *part))
                digests |= taken(writing)
            finally:
                for _ in parts:  # the ranks with the other shards wait in these gathers if this one stops early
                    pass
        return digests

    def restore(self, reader: CheckpointReader) -> None:
        """Load the optimizer's state, saved in any layout.

        Raises: ConfigError if it belongs to another model or optimizer.
        """

        def part(name: str, kind: str) -> Tensor | None:
            full = reader.get(kind, self.parameters.infos[name].saved)
            return full if full is None or full.dim() == 0 else self.parameters.state_part(name, full)

        expected = state_kinds(self._settings())
        check_kinds(reader.kinds, expected, reader.directory, has_optimizer_files=reader.has_optimizer_files)
        with self.memory.used("optimizer", changes=True):
            unpack_state(self.torch_optimizer, self.masters(), part, reader.kinds)

    def _parts(
        self, writer: CheckpointWriter, *, before_own: Callable[[], object]
    ) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor] | None]]:
        """Yield this rank's files: number, full weights and full optimizer tensors (None: none), on the CPU.

        The data-parallel ranks of a stage take its files in turn. Tensors are gathered one at a time, by all ranks that
        hold a part; a rank calls `before_own` before it keeps those of its own files.
        """
        is_trained = writer.has_optimizer and self.torch_optimizer is not None
        masters = self.masters() if is_trained else {}
        own, parameters = {info.name for info in self._of_this_stage(self.saved_infos)}, self.parameters
        layout = self._parallelism.layout
        of_stage = [number for number, names in enumerate(writer.files) if names[0] in own]
        for place, number in enumerate(of_stage):
            is_of_this_copy = place % layout.dp_size == layout.dp_rank
            if not (is_of_this_copy or layout.is_partitioned):
                continue
            is_own = is_of_this_copy and layout.tp_rank == 0
            if is_own:
                before_own()
            names = writer.files[number]
            weights, state = dict[str, Tensor](), dict[str, Tensor]()
            for name in names:
                for stored, weight in parameters.infos[name].saved.split(parameters.full_weight(name)):
                    keep(weights, stored, weight, is_own=is_own)
                if not is_trained:
                    continue
                packed = pack_state(self.torch_optimizer, masters[name], with_master=self._keeps_masters)
                for kind, part in sorted(packed.items()):  # gathers: in one order on all ranks
                    full = part if part.dim() == 0 else parameters.full_state(name, part)
                    keep(state, f"{kind}/{name}", full, is_own=is_own)
            if is_own:
                yield number, weights, state if is_trained else None

    def _of_this_stage(self, infos: Sequence[ParameterInfo]) -> list[ParameterInfo]:
        stage = self._parallelism.layout.stage
        return [info for info in infos if info.stage == stage]

    def _merged(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a full weight, of 4 bits what they stand for, with its adapter, if it has one; collective."""
        layer = name.removesuffix(".weight")
        quantized = None if self.adapters is None else self.adapters.quantized_weight(layer)
        weight = self.parameters.full_weight(name) if quantized is None else quantized
        if self.adapters is None or layer not in self.adapters.layers:
            return weight.to(dtype)
        a, b = (self.parameters.full_weight(f"{layer}.{factor}.weight") for factor in FACTORS)
        return self.adapters.merged(weight, a, b, dtype)

    def _dropout(self, first: PolicyInput) -> AbstractContextManager[None]:
        """Return the context of a backward: masks of dropout that the step and its mini-batch alone decide."""
        if self.adapters is None:
            return nullcontext()
        version, layout = int(first.loss_arrays["trainer_version"]), self._parallelism.layout
        return self.adapters.dropout(f"{self.role} {version} {self._num_accumulated} {layout.dp_rank}")

    def _settings(self) -> OptimizerConfig:
        if self._optimizer is None:
            raise ValueError(f"the {self.role} model is frozen")
        return self._optimizer
