"""Train on ColossalAI's HybridParallelPlugin: tensor shards, pipeline stages, data-parallel copies, ZeRO 1 and 2.

The plugin cuts the model over tensor ranks and pipeline stages, schedules the pipeline, keeps float32 masters and
shares them out under ZeRO. Gradients are ours (`gradient_reduction`): neither DDP nor ZeRO's hooks ever reduce one, so
above the accumulated gradient there is no average to undo, in any layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from consumer.models.policy_model import PolicyInput, Precision
from consumer.parallel.colossal_compat import Booster, HybridParallelModule, HybridParallelPlugin
from consumer.parallel.gradient_reduction import GradientReducer, accumulate_in_float32
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, score_each
from consumer.parallel.parameters import LocalParameters, ParameterInfo
from consumer.parallel.pipeline_stage import check_stages
from consumer.parallel.process_group import agree, collective, timeout_of_new_groups
from consumer.parallel.reduction import reduce_sums, sum_over_ranks
from consumer.parallel.shardformer_policy import PlanPolicy


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
    ) -> None:
        """`timeout_s`: of collectives in the groups that are made here."""
        # One copy has nobody to share with; ColossalAI would flatten its masters all the same.
        is_alone = dist.get_world_size() == tp_size * pp_size
        self.device = device
        self._timeout_s = timeout_s
        self._precision = precision
        with timeout_of_new_groups(timeout_s), collective("arrange the trainers"):
            self._plugin = HybridParallelPlugin(
                tp_size=tp_size,
                pp_size=pp_size,
                zero_stage=0 if is_alone else zero_stage,
                precision=precision,
                microbatch_size=1,  # of the scheduler's batch, which only counts our micro-batches
                enable_metadata_cache=False,  # every micro-batch has its own length, and scoring comes in between
                max_norm=0.0,  # ours clips: it has to come after scaling, to report, and to refuse
                overlap_communication=False,  # there is nothing to overlap: we reduce
            )
        self.layout = self._plugin.layout()

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """See `Parallelism`."""
        manager = self._plugin.stage_manager
        num_layers = model.config.num_hidden_layers
        layers = [num_layers] if manager is None else list(manager.distribute_layers(num_layers))
        if len(layers) > 1:
            check_stages(model, layers)
        return layers

    def shard(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], optimizer: torch.optim.Optimizer | None
    ) -> "HybridModel":
        """See `Parallelism`."""
        with timeout_of_new_groups(self._timeout_s), collective("cut up the model"):
            wrapped, boosted = self._wrap(model, optimizer)
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
        """At least one for each stage: a pipeline wants that. The ranks of a copy have the same number."""
        return max(wanted, self.layout.num_stages) if wanted else 0

    def sum_over_ranks(self, value: float) -> float:
        """See `Parallelism`."""
        return sum_over_ranks(value, device=self.device)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """See `Parallelism`."""
        if not self.layout.is_last_stage:
            return {}
        return reduce_sums(sums, device=self.device, group=self.layout.dp_group)

    def broadcast_text(self, text: str | None) -> str:
        """See `Parallelism`; the senders are the heads of the stages."""
        data = torch.tensor(list((text or "").encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor(len(data), device=self.device)
        self._broadcast(length)
        data = data if text is not None else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return bytes(data.tolist()).decode()

    def agree(self, action: Callable[[], None] | None) -> None:
        """See `Parallelism`."""
        agree(action)

    def close(self) -> None:
        """Leave the plugin's process groups; the default group stays."""
        self._plugin.close()

    def _broadcast(self, data: Tensor) -> None:
        if self.layout.pp_group is not None:
            with collective("agree on a weight sync"):
                dist.broadcast(data, src=0, group=self.layout.pp_group)

    def _wrap(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> tuple[Any, Any]:
        plugin = self._plugin
        with _buffers_kept(model):
            # Built here and not by the plugin, which would add DDP: that allocates buckets as large as the model, sends
            # buffers in every forward, averages what is a sum, and refuses a frozen model.
            module = HybridParallelModule(
                model,
                precision=self._precision,
                shard_config=plugin.shard_config,
                dp_group=plugin.dp_group,
                tp_group=plugin.tp_group,
                sp_group=plugin.sp_group,
                use_ddp=False,
                ddp_config={},
                custom_policy=PlanPolicy(),
            )
            module.require_grad_sync = False
            if optimizer is None:
                return module, None
            wrapped, boosted, *_ = Booster(plugin=plugin).boost(module, optimizer)
        if self.layout.is_partitioned:
            for hook in boosted.grad_handles:  # of stage 2, which would reduce in the backward
                hook.remove()
            boosted._compute_grad_norm = lambda **_: 0.0  # of gradients that are already clipped, over all ranks
        return wrapped, boosted

    def _tied_group(self, infos: Sequence[ParameterInfo]) -> dist.ProcessGroup | None:
        layout, last = self.layout, self.layout.num_stages - 1
        if not any(info.tied_name for info in infos):
            return None
        group = self._plugin.stage_manager.init_process_group_by_stages([0, last])
        return group if layout.stage in (0, last) else None


class HybridModel:
    """Implement `ShardedModel` with what the plugin has cut up."""

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
        """Take over what the plugin made of a model and its optimizer.

        Args:
            wrapped: the model.
            boosted: the optimizer; None if the model is frozen.
            parameters: this rank's.
            plugin: schedules the pipeline.
            layout: this rank's place.
            tied_group: of the two stages that hold a tied embedding, on their ranks alone.
            device: what this rank computes on.
        """
        self.parameters = parameters
        self._wrapped = wrapped
        self._boosted = boosted
        self._plugin = plugin
        self._layout = layout
        self._device = device
        is_frozen = boosted is None
        self._reducer: Any = None if is_frozen else GradientReducer(parameters, layout, tied_group=tied_group)

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """See `ShardedModel`."""
        if self._layout.num_stages == 1:
            return score_each(self._wrapped, inputs)
        scores: list[Tensor] = []

        def keep(output: Any, _: Any) -> Tensor:
            scores.append(output[0])
            return torch.zeros((), device=self._device)

        self._run_pipeline(inputs, keep)
        return scores

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """See `ShardedModel`."""
        if self._layout.num_stages == 1:
            return accumulate_each(self._wrapped, inputs, self._reducer.after_backward)
        sums: dict[str, Tensor] = {}

        def loss_of(output: Any, _: Any) -> Tensor:
            nonlocal sums
            loss, terms = output
            sums = merge_sums(sums, terms)
            # The scheduler divides by the number of micro-batches; a loss here is already its share of a sum.
            return loss * len(inputs)

        self._run_pipeline(inputs, loss_of)
        return sums

    def reduce_gradients(self) -> dict[str, Tensor]:
        """See `ShardedModel`."""
        return self._reducer.reduce()

    def forget_gradients(self) -> None:
        """See `ShardedModel`."""
        self._reducer.forget()

    def masters(self) -> dict[str, Tensor]:
        """See `ShardedModel`."""
        masters = self._boosted.get_working_to_master_map()  # None in float32, where parameters are stepped on
        by_name = self.parameters.by_name
        return {name: p if masters is None else masters[id(p)] for name, p in by_name.items()}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """See `ShardedModel`."""
        if self._layout.is_partitioned:
            self._hand_over_slices(gradients)  # else they are the parameters' own, where the optimizer finds them
        with collective("take an optimizer step"):
            self._boosted.step()
        self._boosted.zero_grad()

    def _hand_over_slices(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters.by_name[name]
            store = self._boosted.pid_to_grad_store[id(parameter)]
            # It looks for its own copy's slice among those of all copies; in stage 2 there is only one.
            for _ in range(1 if self._layout.zero_stage == 2 else self._layout.dp_size):
                store.append_gradients_by_param_id(gradient, 0, id(parameter))

    def _run_pipeline(self, inputs: Sequence[PolicyInput], criterion: Callable[[Any, Any], Tensor]) -> None:
        """All micro-batches through all stages; with gradients enabled, and back."""
        scheduler = self._plugin.scheduler
        # It remembers the sizes of its first batch and takes another for a mistake.
        scheduler.num_microbatches = scheduler.last_batch_size = None
        batch = {"queue": iter(inputs), "places": torch.empty(len(inputs), 0, device=self._device)}
        is_shared_out = self._layout.is_partitioned and self._boosted is not None
        with self._boosted.no_sync() if is_shared_out else nullcontext():
            scheduler.forward_backward_step(self._wrapped, iter([batch]), criterion, self._boosted)


@contextmanager
def _buffers_kept(model: PreTrainedModel) -> Iterator[None]:
    """Undo what the plugin's bfloat16 cast does to buffers.

    Rotary frequencies rounded to 8 bits turn positions in the hundreds by whole radians; transformers, and inference
    engines, keep them in float32.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = kept[name].to(buffer.device)
