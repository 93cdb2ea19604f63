"""The training engine: ColossalAI's Booster with its HybridParallelPlugin, data-parallel over the default group.

It alone knows what the plugin does to a gradient: when it is reduced over ranks, by what factor, and in which precision
it is stepped on. Above it a gradient is the plain sum over the global batch.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coati_rl.batch import MiniBatch
from coati_rl.errors import RunError
from coati_rl.protocols import LossFn
from consumer.colossal_compat import Booster, HybridParallelPlugin
from consumer.plan_policy import PlanPolicy
from consumer.policy_model import PolicyInput
from consumer.process_group import collective, set_timeout
from consumer.torch_backend import BackendConfig, TorchBackend


class ColossalBackend(TorchBackend):
    """Trains on all ranks of the default process group, which must exist; float32, or bfloat16 with float32 masters."""

    def __init__(self, config: BackendConfig, *, device: torch.device, timeout_s: float) -> None:
        super().__init__(config, device=device)
        self._plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=1,
            zero_stage=0,
            precision=config.precision,
            custom_policy=PlanPolicy(),
            make_vocab_size_divisible_by=1,  # no padding: exported and saved weights keep their shape
            max_norm=0.0,  # ours clips: it has to come after scaling, to report, and to refuse
            broadcast_buffers=False,  # rotary frequencies are constants; sending them is a collective in each forward
        )
        set_timeout(self._plugin.member_groups(), timeout_s)
        self.dp_size = self._plugin.dp_size
        self.dp_rank = int(self._plugin.pg_mesh.coordinate(self._plugin.dp_axis))
        self._booster = Booster(plugin=self._plugin)
        with _buffers_kept(self.policy):
            self._boosted, self._optimizer, *_ = self._booster.boost(self.policy, self._adamw)

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add the gradient of the summed loss; with the step's last mini-batch, sum it over ranks.

        Returns: this rank's sums, float64[] each, as `loss_fn` reports them.
        Raises: EngineError if another rank does not take part in time.
        """
        # Around all of it: DDP talks to other ranks in the backward that reduces, and once in a forward, after the
        # first step, to arrange its buckets in the order in which gradients arrived.
        with collective("sum gradients over trainers"):
            return super().forward_backward(mini_batch, loss_fn)

    def save(self, directory: Path, *, state: dict[str, Any]) -> None:
        """Publish a checkpoint; rank 0 writes while the others wait.

        Raises: RunError on every rank if it cannot be written.
        """
        error: RunError | None = None
        if dist.get_rank() == 0:
            try:
                super().save(directory, state=state)
            except RunError as failure:
                error = failure
        # Without this word from rank 0 the others would wait in the next step for a rank that has given up.
        failed = torch.tensor(int(error is not None), device=self.device)
        with collective("finish a checkpoint together"):
            dist.all_reduce(failed)
        if error is not None:
            raise error
        if failed:
            raise RunError(f"checkpoint {directory} could not be written by trainer 0")

    def close(self) -> None:
        """Leave the plugin's process groups; the default group stays."""
        self._plugin.close()

    def _forward(self, inputs: PolicyInput) -> tuple[Tensor, dict[str, Tensor]]:
        return self._boosted(inputs)

    def _backward(self, loss: Tensor) -> None:
        # DDP averages over the dp ranks. A loss here is already its share of a sum (DESIGN: the denominator is global),
        # so the average is undone, here and nowhere else: the accumulated gradient is the plain sum over ranks.
        self._booster.backward(loss * self.dp_size, self._optimizer)

    def _without_reduction(self) -> AbstractContextManager[None]:
        return self._booster.no_sync(self._boosted, self._optimizer)

    def _masters(self) -> dict[str, Tensor]:
        masters = self._optimizer.get_working_to_master_map()  # None in float32, where parameters are stepped on
        named = self.policy.named_parameters()
        return {name: parameter if masters is None else masters[id(parameter)] for name, parameter in named}


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
