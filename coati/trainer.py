"""Place the ranks of a trainer: in this process, in each of torchrun's, or on a cluster; and send its weights."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from coati.engine import Engine
from coati.settings import device_of, tokenizer_of, trainer_config
from coati_rl.config import Config
from coati_rl.config.plan import resolve_precision
from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings
from coati_rl.errors import RunError, TransferError
from coati_rl.members import Members
from coati_rl.model_files.identity import weights_identity
from coati_rl.transport.manifest import WeightManifest
from consumer.objectives.objective import Objective
from consumer.objectives.own_loss import Loss, OwnLoss
from consumer.parallel.own_member import OwnMember, join_torchrun, torchrun_address
from consumer.trainer_client import TrainerClient
from consumer.trainer_rank import TrainerRank

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Describe weights that engines serve now."""

    policy_version: int  # optimizer steps taken
    digest: str  # of the bytes, the same at all senders and receivers
    identity: str  # of the weights: the digest, or that of base and adapters
    gap: float | None  # largest |engine - trainer|, nats, over the tokens of a sample; None: no sample was trained yet
    seconds: float


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
        build = (config, objective, torchrun_address() if on is None else on.address)
        members.call("build", [build] * members.size)
        super().__init__(config, tokenizer_of(config), members)
        sync = config.sync if isinstance(config, Config) else SyncConfig()
        is_rounded = resolve_precision(config, kind) == "bf16"
        self._monitor = LogprobMismatchMonitor(MismatchSettings(precision="bf16" if is_rounded else "fp32"), sync)

    def push_to(self, engine: Engine, *, timeout_s: float = 60.0) -> Push:
        """Let the engine serve this trainer's weights, after comparing digests and the log-probabilities of a sample.

        Raises: TransferError; RunError if bytes or log-probabilities differ.
        """
        begin = time.perf_counter()
        manifest, invitations, senders = next(filter(None, self.each("open", engine.number, engine.ranks, self.step)))
        staged = engine.begin_staging(manifest, invitations, timeout_s)
        try:
            sent = {digest for digest in self.each("send", manifest, senders, timeout_s) if digest}
        except TransferError:
            staged()  # raises why an engine has not received it, if that was the reason
            raise
        received = {digest for digests in staged() for digest in digests}
        if sent != received or len(sent) != 1:
            raise RunError(f"corrupt weight transfer: sent {sorted(sent)}, received {sorted(received)}")
        probe = self.probe[: engine.max_tokens - 1] or [0, 0]
        self._monitor.expect(self.step, *next(filter(None, self.each("probe", probe))))
        size, gaps = engine.members.size, list[float]()
        identity = weights_identity(WeightManifest.from_json(manifest).base, next(iter(sent)))
        for served, logprobs in engine.members.call("commit", [(self.step, probe, timeout_s)] * size):
            if {*served} != {identity}:
                raise RunError(f"the engine serves weights {sorted(served)}, the trainers have {identity}")
            gap = self._monitor.measure(self.step, logprobs) if self.probe else None
            if gap is not None:
                gaps.append(gap.max)
                if problem := self._monitor.probe_problem(self.step, logprobs, gap):
                    raise RunError(problem)
        seconds = time.perf_counter() - begin
        return Push(
            policy_version=self.step,
            digest=sent.pop(),
            identity=identity,
            gap=max(gaps, default=None),
            seconds=seconds,
        )
