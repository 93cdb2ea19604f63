"""Place the ranks of a trainer: in this process, in each of torchrun's, or on a cluster; and send its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from coati.engine import Engine
from coati.push import Push, Pusher
from coati.settings import device_of, tokenizer_of, trainer_config
from coati_rl.config import Config
from coati_rl.config.plan import resolve_precision
from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings
from coati_rl.members import Members
from consumer.objectives.objective import Objective
from consumer.objectives.own_loss import Loss, OwnLoss
from consumer.parallel.own_member import OwnMember, join_torchrun, torchrun_address
from consumer.trainer_client import TrainerClient
from consumer.trainer_rank import TrainerRank

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster


class Trainer(TrainerClient):
    """Train one model, with the others that its loss needs."""

    def __init__(
        self,
        model: str | Path,
        loss: str | Objective | Loss = "grpo",
        *,
        on: "Cluster | None" = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        **flags: Any,
    ) -> None:
        """Prove the settings on the model, and load it.

        Args:
            model: directory, or hub id.
            loss: an algorithm of `--algo`; "sft", "rm", "dpo", "kto", "prm" or "value"; an objective; or a function of
                float32[R, M] log-probabilities and entropies and the samples' arrays, to the summed loss.
            on: a cluster, over whose trainers the model is laid out; None: this process, or all of torchrun.
            device: of this process.
            flags: of the loss's command, such as kl_coeff, tensor_parallel_size, plugin, precision.
        Raises: ConfigError.
        """
        kind = device_of(device) if on is None else on.device
        own = join_torchrun(kind) if on is None else None
        num_ranks = on.num_trainers if on is not None else dist.get_world_size() if dist.is_initialized() else 1
        config = trainer_config(model, loss, num_trainers=num_ranks, device=kind, **flags)
        objective = None if isinstance(loss, str) else loss if isinstance(loss, Objective) else OwnLoss(loss)
        members: Members = OwnMember(lambda: TrainerRank(own)) if on is None else on.trainers(config)
        in_turns = on is not None and on.takes_turns
        build = (config, objective, torchrun_address() if on is None else on.address, in_turns)
        members.call("build", [build] * members.size)
        super().__init__(config, tokenizer_of(config), members, kind)
        self.reads_rollout_logprobs = isinstance(loss, str)
        sync = config.sync if isinstance(config, Config) else SyncConfig()
        is_rounded = resolve_precision(config, kind) == "bf16"
        settings = MismatchSettings(precision="bf16" if is_rounded else "fp32")
        self._pusher = Pusher(self, LogprobMismatchMonitor(settings, sync))

    def push_to(self, engine: Engine, *, timeout_s: float = 60.0) -> Push:
        """Let the engine serve this trainer's weights, after comparing digests and the log-probabilities of a sample.

        An engine that sleeps keeps them until `engine.wake()`, which compares the log-probabilities and returns a Push.

        Raises: TransferError; RunError if bytes or log-probabilities differ.
        """
        probe = self.probe[: engine.max_tokens - 1]
        return self._pusher.push(engine, self.step, probe, timeout_s=timeout_s, is_shared=engine.follows is self)
