"""The training engine: ColossalAI's HybridParallelPlugin on all ranks of the default group.

The plugin cuts the model over tensor ranks and pipeline stages, schedules the pipeline, keeps float32 masters and
shares them out under ZeRO. Gradients are ours (`gradient_reduction`): neither DDP nor ZeRO's hooks ever reduce one, so
above the accumulated gradient there is no average to undo, in any layout.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.errors import RunError
from coati_rl.protocols import LossFn, ScoredModel
from consumer.colossal_compat import Booster, HybridParallelModule, HybridParallelPlugin
from consumer.pipeline_stage import check_stages
from consumer.plan_policy import PlanPolicy
from consumer.policy_model import PolicyInput
from consumer.process_group import all_gather_texts, collective, timeout_of_new_groups
from consumer.reduction import reduce_sums
from consumer.torch_backend import BackendConfig, TorchBackend


class ColossalBackend(TorchBackend):
    """Trains on all ranks of the default process group, which must exist; float32, or bfloat16 with float32 masters."""

    def __init__(self, config: BackendConfig, *, device: torch.device, timeout_s: float) -> None:
        # One copy has nobody to share with; ColossalAI would flatten its masters all the same.
        is_alone = dist.get_world_size() == config.tp_size * config.pp_size
        with timeout_of_new_groups(timeout_s), collective("cut up the model"):
            self._plugin = HybridParallelPlugin(
                tp_size=config.tp_size,
                pp_size=config.pp_size,
                zero_stage=0 if is_alone else config.zero_stage,
                precision=config.precision,
                microbatch_size=1,  # of the scheduler's batch, which only counts our micro-batches
                enable_metadata_cache=False,  # every micro-batch has its own length, and scoring comes in between
                max_norm=0.0,  # ours clips: it has to come after scaling, to report, and to refuse
                overlap_communication=False,  # there is nothing to overlap: we reduce
            )
            super().__init__(config, device=device, layout=self._plugin.layout())

    def score(self, micro_batches: Sequence[MicroBatch], model: ScoredModel = "policy") -> list[Tensor]:
        """See `TorchBackend`. Raises: EngineError if another rank does not take part in time."""
        with collective("score a mini-batch"):
            return super().score(micro_batches, model)

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: LossFn) -> dict[str, Tensor]:
        """See `TorchBackend`. Raises: EngineError if another rank does not take part in time."""
        with collective("sum gradients over trainers"):
            return super().forward_backward(mini_batch, loss_fn)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """A step's reported sums over all data-parallel copies; empty without the LM head."""
        if not self.layout.is_last_stage:
            return {}
        with collective("sum metrics over trainers"):
            return reduce_sums(sums, device=self.device, group=self.layout.dp_group)

    def close(self) -> None:
        """Leave the plugin's process groups; the default group stays."""
        self._plugin.close()

    def _layers_per_stage(self, policy: PreTrainedModel) -> list[int]:
        manager = self._plugin.stage_manager
        num_layers = policy.config.num_hidden_layers
        layers = [num_layers] if manager is None else list(manager.distribute_layers(num_layers))
        if len(layers) > 1:
            check_stages(policy, layers)
        return layers

    def _wrap(self, policy: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        plugin = self._plugin
        with _buffers_kept(policy):
            # Built here and not by the plugin, which would add DDP: that allocates buckets as large as the model, sends
            # buffers in every forward, averages what is a sum, and refuses a frozen model.
            model = HybridParallelModule(
                policy,
                precision=self.config.precision,
                shard_config=plugin.shard_config,
                dp_group=plugin.dp_group,
                tp_group=plugin.tp_group,
                sp_group=plugin.sp_group,
                use_ddp=False,
                ddp_config={},
                custom_policy=PlanPolicy(),
            )
            model.require_grad_sync = False
            if optimizer is None:
                return model, None
            wrapped, boosted, *_ = Booster(plugin=plugin).boost(model, optimizer)
        if self.layout.is_partitioned:
            for hook in boosted.grad_handles:  # of stage 2, which would reduce in the backward
                hook.remove()
            boosted._compute_grad_norm = lambda **_: 0.0  # of gradients that are already clipped, over all ranks
        return wrapped, boosted

    def _tied_group(self) -> dist.ProcessGroup | None:
        layout, last = self.layout, self.layout.num_stages - 1
        if not any(info.tied_name for info in self.infos):
            return None
        group = self._plugin.stage_manager.init_process_group_by_stages([0, last])
        return group if layout.stage in (0, last) else None

    def _scores(self, model: nn.Module, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        if self.layout.num_stages == 1:
            return super()._scores(model, inputs)
        scores: list[Tensor] = []

        def keep(output: Any, _: Any) -> Tensor:
            scores.append(output[0])
            return torch.zeros((), device=self.device)

        self._run_pipeline(model, inputs, keep)
        return scores

    def _accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        if self.layout.num_stages == 1:
            return super()._accumulate(inputs)
        sums: dict[str, Tensor] = {}

        def loss_of(output: Any, _: Any) -> Tensor:
            nonlocal sums
            loss, terms = output
            sums = merge_sums(sums, terms)
            # The scheduler divides by the number of micro-batches; a loss here is already its share of a sum.
            return loss * len(inputs)

        self._run_pipeline(self._model, inputs, loss_of)
        return sums

    def _run_pipeline(
        self, model: nn.Module, inputs: Sequence[PolicyInput], criterion: Callable[[Any, Any], Tensor]
    ) -> None:
        """All micro-batches through all stages; with gradients enabled, and back."""
        scheduler = self._plugin.scheduler
        # It remembers the sizes of its first batch and takes another for a mistake.
        scheduler.num_microbatches = scheduler.last_batch_size = None
        batch = {"queue": iter(inputs), "places": torch.empty(len(inputs), 0, device=self.device)}
        with self._optimizer.no_sync() if self.layout.is_partitioned else nullcontext():
            scheduler.forward_backward_step(model, iter([batch]), criterion, self._optimizer)

    def _sum_over_ranks(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        with collective("measure the gradient"):
            dist.all_reduce(total)
        return float(total)

    def _step(self) -> None:
        optimizer = self._optimizer
        if self.layout.is_partitioned:
            for name, gradient in self.gradients.items():
                parameter = self.parameters.by_name[name]
                store = optimizer.pid_to_grad_store[id(parameter)]
                # It looks for its own copy's slice among those of all copies; in stage 2 there is only one.
                for _ in range(1 if self.layout.zero_stage == 2 else self.layout.dp_size):
                    store.append_gradients_by_param_id(gradient, 0, id(parameter))
        with collective("take an optimizer step"):
            optimizer.step()
        optimizer.zero_grad()

    def _masters(self) -> dict[str, Tensor]:
        masters = self._optimizer.get_working_to_master_map()  # None in float32, where parameters are stepped on
        by_name = self.parameters.by_name
        return {name: p if masters is None else masters[id(p)] for name, p in by_name.items()}

    def _agree(self, action: Callable[[], None] | None) -> None:
        reason = ""
        try:
            if action is not None:
                action()
        except RunError as error:
            reason = str(error)
            raise
        except BaseException as error:
            reason = repr(error)
            raise
        finally:
            # Without this word the others would wait in the next step for a rank that has given up.
            with collective("finish a checkpoint together"):
                reasons = all_gather_texts(reason)
        for rank, reason in enumerate(reasons):
            if reason:
                raise RunError(f"trainer {rank}: {reason}")


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what the plugin's bfloat16 cast does to buffers.

    Rotary frequencies rounded to 8 bits turn positions in the hundreds by whole radians; transformers, and inference
    engines, keep them in float32.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = kept[name].to(buffer.device)
