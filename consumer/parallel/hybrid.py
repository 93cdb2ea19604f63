"""Train with ColossalAI's HybridParallelPlugin: tensor, pipeline and data parallelism, ZeRO stages 1 and 2.

The plugin shards the model over tensor-parallel ranks and pipeline stages, schedules the pipeline, keeps float32
masters and partitions them under ZeRO. `gradient_reduction` reduces gradients: DDP and ZeRO's hooks, which average, are
not used in any layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from consumer.models.loading import convert
from consumer.models.policy_model import HeadWeights, PolicyInput, Precision
from consumer.parallel.colossal_compat import Booster, HybridParallelModule, HybridParallelPlugin
from consumer.parallel.context_groups import destroy_context_groups, with_context_groups
from consumer.parallel.gradient_reduction import GradientReducer, accumulate_in_float32
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, local_head, score_each
from consumer.parallel.parameters import LocalParameters, ParameterInfo
from consumer.parallel.pipeline_stage import check_stages
from consumer.parallel.process_group import agree, collective, timeout_of_new_groups
from consumer.parallel.reduction import add_over_ranks, reduce_sums, sum_over_ranks
from consumer.parallel.shardformer_policy import DecoderPolicy


class HybridParallelism:
    """Implement `Parallelism` with the plugin on all ranks of the default group, which must exist."""

    def __init__(
        self,
        *,
        tp_size: int,
        pp_size: int,
        zero_stage: int,
        precision: Precision,
        device: torch.device,
        timeout_s: float,
        cp_size: int = 1,
    ) -> None:
        """Create the process groups; `timeout_s` is the time limit of their collectives.

        Context-parallel ranks hold copies of the weights, as the plugin's data-parallel ranks do.
        """
        # With one copy of the weights ZeRO has no effect, but ColossalAI would still flatten the masters.
        is_single_copy = dist.get_world_size() == tp_size * pp_size
        self.device, self._precision, self._timeout_s = device, precision, timeout_s
        with timeout_of_new_groups(timeout_s), collective("create the process groups of the layout"):
            self._plugin = HybridParallelPlugin(
                tp_size=tp_size,
                pp_size=pp_size,
                zero_stage=0 if is_single_copy else zero_stage,
                precision=precision,
                microbatch_size=1,  # rows of the scheduler's placeholder batch, one for each micro-batch
                enable_metadata_cache=False,  # every micro-batch has its own length, and scoring runs in between
                max_norm=0.0,  # `gradient_clipping` clips after scaling, and refuses a norm that is not finite
                overlap_communication=False,  # the plugin does not reduce gradients
            )
            self.layout = with_context_groups(self._plugin.layout(), cp_size)

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        manager, num_layers = self._plugin.stage_manager, model.config.get_text_config().num_hidden_layers
        layers = [num_layers] if manager is None else list(manager.distribute_layers(num_layers))
        if len(layers) > 1:
            check_stages(model, layers)
        return layers

    def shard(
        self,
        model: PreTrainedModel,
        infos: Sequence[ParameterInfo],
        optimizer: torch.optim.Optimizer | None,
        attach: Callable[[nn.Module], None] | None = None,
    ) -> "HybridModel":
        with timeout_of_new_groups(self._timeout_s), collective("shard the model"):
            wrapped, boosted = self._wrap(model, optimizer, attach)
            if optimizer is not None:
                accumulate_in_float32(model)
            return HybridModel(
                wrapped,
                boosted,
                LocalParameters(model, infos, self.layout),
                self._plugin,
                layout=self.layout,
                tied_group=None if optimizer is None else self._tied_group(infos),
                device=self.device,
            )

    def num_micro_batches(self, wanted: int) -> int:
        """Return at least one per pipeline stage, as the schedule requires; equal on ranks with the same dp_rank."""
        return max(wanted, self.layout.num_stages) if wanted else 0

    def sum_over_ranks(self, value: float) -> float:
        return sum_over_ranks(value, device=self.device)

    def add_over_ranks(self, values: Tensor) -> Tensor:
        return add_over_ranks(values)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        if not self.layout.is_last_stage:
            return {}
        return reduce_sums(sums, device=self.device, group=self.layout.data_group)

    def broadcast_text(self, text: str | None) -> str:
        """See `Parallelism`; the senders are the head ranks of the pipeline stages."""
        data = torch.tensor(list((text or "").encode()), dtype=torch.uint8, device=self.device)
        self._broadcast(length := torch.tensor(len(data), device=self.device))
        data = data if text is not None else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return bytes(data.tolist()).decode()

    def agree(self, action: Callable[[], str | None] | None) -> list[str]:
        return agree(action)

    def close(self) -> None:
        """Destroy the plugin's process groups and those of context-parallel ranks; the default group stays."""
        destroy_context_groups(self.layout)
        self._plugin.close()

    def _broadcast(self, data: Tensor) -> None:
        if self.layout.pp_group is not None:
            with collective("agree on a weight sync"):
                dist.broadcast(data, src=0, group=self.layout.pp_group)

    def _wrap(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer | None,
        attach: Callable[[nn.Module], None] | None,
    ) -> tuple[Any, Any]:
        plugin = self._plugin
        with _buffers_kept(model):
            # Built here and not by the plugin, which would add DDP: DDP allocates buckets as large as the model, sends
            # buffers in every forward, averages gradients, and refuses a frozen model.
            module = HybridParallelModule(
                model,
                precision=self._precision,
                shard_config=plugin.shard_config,
                dp_group=plugin.dp_group,
                tp_group=plugin.tp_group,
                sp_group=plugin.sp_group,
                use_ddp=False,
                ddp_config={},
                custom_policy=DecoderPolicy(),
            )
            if attach is not None:
                attach(model)
            convert(model)
            module.require_grad_sync = False
            module.convert_fn = None  # hidden states of the stage before have the right dtype, float32 where asked for
            if optimizer is None:
                return module, None
            wrapped, boosted, *_ = Booster(plugin=plugin).boost(module, optimizer)
        if self.layout.is_partitioned:
            for hook in boosted.grad_handles:  # of ZeRO stage 2, which would reduce in the backward
                hook.remove()
            boosted._compute_grad_norm = lambda **_: 0.0  # `gradient_clipping` has computed it
        return wrapped, boosted

    def _tied_group(self, infos: Sequence[ParameterInfo]) -> dist.ProcessGroup | None:
        layout, last = self.layout, self.layout.num_stages - 1
        if not any(info.tied_name for info in infos):
            return None
        group = self._plugin.stage_manager.init_process_group_by_stages([0, last])
        return group if layout.stage in (0, last) else None


class HybridModel:
    """Implement `ShardedModel` with a model that the plugin has sharded."""

    def __init__(
        self,
        wrapped: Any,
        boosted: Any,
        parameters: LocalParameters,
        plugin: HybridParallelPlugin,
        *,
        layout: Layout,
        tied_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Use a model and an optimizer that the plugin has wrapped.

        Args:
            wrapped: the model.
            boosted: the optimizer; None if the model is frozen.
            parameters: this rank's parameters.
            plugin: schedules the pipeline.
            layout: of this rank.
            tied_group: joins the two pipeline stages that hold a tied embedding; None on other ranks.
            device: the device that this rank computes on.
        """
        self.parameters = parameters
        self._wrapped = wrapped
        self._boosted = boosted
        self._plugin = plugin
        self._layout = layout
        self._device = device
        self._reducer: Any = None if boosted is None else GradientReducer(parameters, layout, tied_group=tied_group)

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        if self._layout.num_stages == 1:
            return score_each(self._wrapped, inputs)
        scores: list[Tensor] = []

        def keep(output: Any, _: Any) -> Tensor:
            scores.append(output[0])
            return torch.zeros((), device=self._device)

        self._run_pipeline(inputs, keep)
        return scores

    def head_weights(self) -> HeadWeights | None:
        return local_head(self._wrapped.unwrap()) if self._layout.is_last_stage else None

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        if self._layout.num_stages == 1:
            after_backward = {} if self._reducer is None else {"after_backward": self._reducer.after_backward}
            return accumulate_each(self._wrapped, inputs, **after_backward)
        sums: dict[str, Tensor] = {}

        def loss_of(output: Any, _: Any) -> Tensor:
            nonlocal sums
            loss, terms = output
            sums = merge_sums(sums, terms)
            # Undo the scheduler's division by the number of micro-batches: losses are summed, not averaged.
            return loss * len(inputs)

        self._run_pipeline(inputs, loss_of)
        return sums

    def reduce_gradients(self) -> dict[str, Tensor]:
        return self._reducer.reduce()

    def forget_gradients(self) -> None:
        self._reducer.forget()

    def masters(self) -> dict[str, Tensor]:
        masters = self._boosted.get_working_to_master_map()  # None in float32: no separate masters
        trained = self.parameters.trained
        return {name: p if masters is None else masters[id(p)] for name, p in trained.items()}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        if self._layout.is_partitioned:
            self._store_slices(gradients)  # otherwise the optimizer reads the parameters' own gradients
        with collective("take an optimizer step"):
            self._boosted.step()
        self._boosted.zero_grad()

    def _store_slices(self, gradients: Mapping[str, Tensor]) -> None:
        groups = self._boosted._working_param_groups
        group_of = {id(parameter): group for group, parameters in groups.items() for parameter in parameters}
        for name, gradient in gradients.items():
            key = id(self.parameters.trained[name])
            store = self._boosted.pid_to_grad_store[key]
            # It expects the slices of all data-parallel ranks and reads its own; with ZeRO stage 2 only its own.
            # A parameter whose slices are stored under another group than its own would not be updated.
            for _ in range(1 if self._layout.zero_stage == 2 else self._layout.dp_size):
                store.append_gradients_by_param_id(gradient, group_of[key], key)

    def _run_pipeline(self, inputs: Sequence[PolicyInput], criterion: Callable[[Any, Any], Tensor]) -> None:
        """Run all micro-batches through all pipeline stages, forward and, with gradients enabled, backward."""
        scheduler = self._plugin.scheduler
        # It keeps the sizes of its first batch and raises if a later batch differs.
        scheduler.num_microbatches = scheduler.last_batch_size = None
        batch = {"queue": iter(inputs), "placeholder": torch.empty(len(inputs), 0, device=self._device)}
        has_zero = self._layout.is_partitioned and self._boosted is not None
        with self._boosted.no_sync() if has_zero else nullcontext():
            scheduler.forward_backward_step(self._wrapped, iter([batch]), criterion, self._boosted)


@contextmanager
def _buffers_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore the buffers that the plugin casts to bfloat16.

    With rotary frequencies rounded to bfloat16, angles at positions in the hundreds are wrong by whole radians;
    transformers and inference engines keep them in float32.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = kept[name].to(buffer.device)
