"""The training engine without an engine: plain torch on one process. Tests and the Colossal backend build on it.

Consumes mini-batches; produces gradients, steps, log-probabilities, weights and checkpoints. A gradient is always the
plain sum over the global batch, accumulated in float32 until `optimizer_step` scales it.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.data.checkpoint_dir import load_state
from coati_rl.data.packing import blank_micro_batch
from coati_rl.errors import ConfigError
from coati_rl.protocols import LossFn, ScoredModel
from consumer.checkpoint import CheckpointReader, CheckpointWriter
from consumer.gradient_clipping import scale_and_clip, sum_of_squares
from consumer.gradient_reduction import GradientReducer, accumulate_in_float32
from consumer.layout import Layout
from consumer.optimizer_state import pack_state, unpack_state
from consumer.parameters import LocalParameters, ParameterInfo, describe_parameters
from consumer.policy_model import DTYPES, PolicyInput, Precision, load_policy, make_input, policy_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Describe what a training engine is built from."""

    model_dir: Path  # Hugging Face model, or a checkpoint of ours
    tokenizer_dir: Path | None = None  # whose tokenizer goes into checkpoints; None: model_dir
    reference_dir: Path | None = None  # model of the KL penalty; None: there is none
    keeps_old_policy: bool = False  # a copy of the weights, for old_logprobs over several steps
    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int = 0
    precision: Precision = "fp32"  # bf16 keeps float32 master weights
    wire_dtype: torch.dtype = torch.float32  # of exported weights: the inference engines'
    gradient_checkpointing: bool = False
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    keep_checkpoints: int | None = None  # None: all


class TorchBackend:
    """One process. A subclass cuts up the model and the optimizer, and talks to other ranks."""

    def __init__(self, config: BackendConfig, *, device: torch.device, layout: Layout | None = None) -> None:
        self.config = config
        self.device = device
        self.layout = layout or Layout()
        self._float32_masters: dict[int, Tensor] = {}  # id of a bfloat16 parameter to what is stepped on in its place
        self.policy = self._load(config.model_dir, gradient_checkpointing=config.gradient_checkpointing)
        self.infos = describe_parameters(self.policy, self.layout, self._layers_per_stage(self.policy))
        # The learning rate is set by every step.
        self._adamw = torch.optim.AdamW(self.policy.parameters(), lr=0.0, weight_decay=config.weight_decay, fused=True)
        self._model, self._optimizer = self._wrap(self.policy, self._adamw)
        accumulate_in_float32(self.policy)
        self.parameters = LocalParameters(self.policy, self.infos, self.layout)
        self._reducer = GradientReducer(self.parameters, self.layout, tied_group=self._tied_group())
        self.gradients: dict[str, Tensor] = {}  # summed over all ranks; between a step's last mini-batch and the step
        self._reference = self._frozen(config.reference_dir)
        self._old = self._frozen(config.model_dir if config.keeps_old_policy else None)

    def score(self, micro_batches: Sequence[MicroBatch], model: ScoredModel = "policy") -> list[Tensor]:
        """Log-probabilities at the sampling temperature of one of the models; no gradient.

        Returns: a float32[R, L] per micro-batch, 0 where the loss mask is False; nothing on ranks without the LM head.
        Raises: ValueError if the backend was built without this model.
        """
        scored = {"policy": self._model, "old": self._old, "reference": self._reference}[model]
        if scored is None:
            raise ValueError(f"this backend was built without the {model} model")
        inputs = [make_input(micro_batch, device=self.device) for micro_batch in self._filled(micro_batches)]
        with torch.no_grad():
            return self._scores(scored, inputs)[: len(micro_batches)]

    @torch.no_grad()
    def keep_old_policy(self) -> None:
        """The policy as it is now becomes the "old" one; every rank copies its own part.

        Raises: ValueError if the backend was built without an old policy.
        """
        if self._old is None:
            raise ValueError("this backend was built without the old model")
        for old, parameter in zip(self._old.parameters(), self._model.parameters(), strict=True):
            old.copy_(parameter)

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add the gradient of the summed loss; with the step's last mini-batch, sum it over ranks.

        The trainer's version of the weights is the number of steps taken, which is `mini_batch.step`.

        Returns: the sums that `loss_fn` reports, float64[] each, of this rank's samples; empty without the LM head.
        """
        is_due = mini_batch.micro_batches or mini_batch.is_last  # a rank without samples still takes part in the step
        inputs = [
            make_input(micro_batch, device=self.device, trainer_version=mini_batch.step, loss_fn=loss_fn)
            for micro_batch in (self._filled(mini_batch.micro_batches) if is_due else ())
        ]
        sums = self._accumulate(inputs) if inputs else {}
        if mini_batch.is_last:
            self.gradients = self._reducer.reduce()
        return sums

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """A step's reported sums over all ranks; empty without the LM head."""
        return {name: float(value) for name, value in sums.items()}

    def optimizer_step(self, *, loss_scale: float, learning_rate: float) -> float:
        """Scale the accumulated gradient, clip it, step, and forget it; with a scale of 0 only forget it.

        Returns: the scaled gradient's norm before clipping, the same on every rank.
        Raises: EngineError if the norm is not finite; no weight has changed then.
        """
        counted = [gradient for name, gradient in self.gradients.items() if self.parameters.counts_in_norm(name)]
        norm = scale_and_clip(
            list(self.gradients.values()),
            self._sum_over_ranks(sum_of_squares(counted)),
            loss_scale=loss_scale,
            max_norm=self.config.max_grad_norm,
        )
        if loss_scale > 0:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._step()
        self.gradients = {}
        self._reducer.forget()
        return norm

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights by Hugging Face name, full, in Hugging Face order and wire dtype.

        Collective over the ranks of the first data-parallel copy; nothing on the others. A tied LM head is left out. A
        tensor that needs no cast is the live weight itself: use it before the next step.
        """
        if self.layout.dp_rank == 0:
            for info in self._own_infos():
                full = self.parameters.full(info.name, self.parameters.by_name[info.name].detach())
                yield info.name, full.to(self.config.wire_dtype)

    def save(self, directory: Path, *, state: dict[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        """Publish a checkpoint under this name; collective. The first rank adds its `files`, by name.

        Raises: RunError on every rank if it cannot be written.
        """
        writer = CheckpointWriter(directory, self.infos, dtype=DTYPES[self.config.precision])
        self._agree(writer.begin if self._is_first_rank else None)
        self._agree(lambda: self._write_parts(writer))
        publish = partial(
            writer.publish,
            model=self.policy,
            tokenizer_dir=self.config.tokenizer_dir or self.config.model_dir,
            state={**state, "rng_state": b64encode(torch.get_rng_state().numpy().tobytes()).decode()},
            files=files,
            keep=self.config.keep_checkpoints,
        )
        self._agree(publish if self._is_first_rank else None)

    def restore(self, directory: Path) -> None:
        """Take over optimizer and random state of a checkpoint whose weights this backend was built from.

        The checkpoint may come from any layout. All ranks draw the same random numbers, those of the one that saved.

        Raises: ConfigError if it belongs to another model.
        """
        reader = CheckpointReader(directory)
        unpack_state(self._adamw, self._masters(), lambda name, kind: self._part_of(reader, name, kind))
        rng_state = load_state(directory).get("rng_state")
        if rng_state is None:
            raise ConfigError(f"{directory} is no checkpoint to resume from: it holds no random state")
        torch.set_rng_state(torch.frombuffer(bytearray(b64decode(rng_state)), dtype=torch.uint8))

    def close(self) -> None:
        """Nothing to release here."""

    # --- what a subclass replaces ----------------------------------------------------------------------------------

    def _layers_per_stage(self, policy: PreTrainedModel) -> list[int]:
        return [policy.config.num_hidden_layers]

    def _wrap(self, policy: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        """Cut up a model, which is on the CPU, and the optimizer of its parameters.

        Afterwards `policy` is this rank's part, on its device: no device ever holds the whole.
        """
        policy.to(self.device)
        policy.forward = policy_forward.__get__(policy)
        if optimizer is not None and self.config.precision == "bf16":
            for group in optimizer.param_groups:
                self._float32_masters |= {id(p): p.detach().float() for p in group["params"]}
                group["params"] = [self._float32_masters[id(p)] for p in group["params"]]
        return policy, optimizer

    def _tied_group(self) -> dist.ProcessGroup | None:
        return None

    def _scores(self, model: nn.Module, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        return [model(each)[0] for each in inputs]

    def _accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for each in inputs:
            loss, terms = self._model(each)
            loss.backward()
            self._reducer.after_backward()
            sums = merge_sums(sums, terms)
        return sums

    def _sum_over_ranks(self, value: float) -> float:
        return value

    def _step(self) -> None:
        """Let the optimizer step on `gradients`, and the model take over what it arrived at."""
        masters = self._masters()
        for name, gradient in self.gradients.items():
            masters[name].grad = gradient
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.by_name.items():
                if masters[name] is not parameter:
                    parameter.copy_(masters[name])

    def _masters(self) -> dict[str, Tensor]:
        """Parameter name to the float32 tensor that the optimizer steps on."""
        return {name: self._float32_masters.get(id(p), p) for name, p in self.parameters.by_name.items()}

    def _agree(self, action: Callable[[], None] | None) -> None:
        """Do this rank's share of a checkpoint, and learn whether the others could do theirs."""
        if action is not None:
            action()

    # --- the same in every layout ----------------------------------------------------------------------------------

    def _frozen(self, directory: Path | None) -> nn.Module | None:
        return None if directory is None else self._wrap(self._load(directory).requires_grad_(False), None)[0]

    def _filled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """A pipeline wants one for each stage at least."""
        return [*micro_batches, *[blank_micro_batch()] * (self.layout.num_stages - len(micro_batches))]

    @property
    def _is_first_rank(self) -> bool:
        return self.layout.is_stage_head and self.layout.is_first_stage

    def _load(self, directory: Path, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
        dtype = DTYPES[self.config.precision]
        return load_policy(directory, dtype=dtype, gradient_checkpointing=gradient_checkpointing)

    def _own_infos(self) -> list[ParameterInfo]:
        return [info for info in self.parameters.infos.values() if info.stage == self.layout.stage]

    def _write_parts(self, writer: CheckpointWriter) -> None:
        parts = self._parts(writer) if self.layout.dp_rank == 0 or self.layout.is_partitioned else iter(())
        try:
            for part in parts:
                if self.layout.is_stage_head:
                    writer.write(*part)
        finally:
            for _ in parts:  # the ranks that hold the other shards go on to the end too
                pass

    def _parts(self, writer: CheckpointWriter) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
        """File by file of this stage: its number, full weights, full tensors of the optimizer; on the CPU.

        Tensors are put together one at a time, and only the head of the stage keeps them.
        """
        masters, own = self._masters(), {info.name for info in self._own_infos()}
        for number, names in enumerate(writer.files):
            if names[0] not in own:
                continue
            weights, state = dict[str, Tensor](), dict[str, Tensor]()
            for name in names:
                parameter = self.parameters.by_name[name]
                self._keep(weights, name, self.parameters.full(name, parameter.detach()))
                for kind, part in pack_state(self._adamw, masters[name], parameter).items():
                    self._keep(state, f"{kind}/{name}", part if kind == "step" else self._whole(name, part))
            yield number, weights, state

    def _keep(self, tensors: dict[str, Tensor], key: str, full: Tensor) -> None:
        if self.layout.is_stage_head:
            tensors[key] = full.cpu()

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return self.parameters.full(name, self.parameters.shard_of_slices(name, part))

    def _part_of(self, reader: CheckpointReader, name: str, kind: str) -> Tensor | None:
        full = reader.get(kind, name)
        if full is None or full.dim() == 0:
            return full
        return self.parameters.slice_of_shard(self.parameters.shard(name, full))
