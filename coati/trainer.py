"""Place the ranks of a trainer: in this process, in each of torchrun's, or on a cluster; and send its weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor

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
    # Of the bytes, the same at all senders and receivers; empty: the engine is one of the trainer's own weights.
    digest: str
    identity: str  # of the weights: the digest, or that of base and adapters
    # Largest |engine - trainer|, nats, over a sample's tokens; None: no sample was trained yet, or the engine sleeps.
    gap: float | None
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
        self.device = kind = device_of(device) if on is None else on.device
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

        An engine that sleeps keeps them until `engine.wake()`, which compares the log-probabilities and returns a Push.

        Raises: TransferError; RunError if bytes or log-probabilities differ.
        """
        self.need("weights")
        begin = time.perf_counter()
        sent = self._push("", "") if engine.follows is self else self._send(engine, timeout_s)
        probe = self.probe[: engine.max_tokens - 1] or [0, 0]
        self._monitor.expect(self.step, *next(filter(None, self.each("probe", probe))))
        pushed = replace(sent, seconds=time.perf_counter() - begin)
        finish = partial(self._finish, engine, pushed, probe, timeout_s)
        if not engine.is_asleep:
            return finish()
        engine.wake_by(finish)
        return pushed

    def live_weights(self) -> dict[str, Tensor]:
        """Return the weights of the only rank, not copied. Raises: RunError if they are not on the device."""
        self.need("weights")
        weights: dict[str, Tensor] = self.each("live_weights")[0]
        return weights

    def _send(self, engine: Engine, timeout_s: float) -> Push:
        """Stage the weights beside those that the engine serves, and compare the bytes."""
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
        (digest,) = sent
        identity = weights_identity(WeightManifest.from_json(manifest).base, digest)
        return self._push(digest, identity)

    def _push(self, digest: str, identity: str) -> Push:
        return Push(policy_version=self.step, digest=digest, identity=identity, gap=None, seconds=0.0)

    def _finish(self, engine: Engine, push: Push, probe: Sequence[int], timeout_s: float) -> Push:
        """Let the engine serve what it has received, and compare log-probabilities."""
        begin, gaps = time.perf_counter(), list[float]()
        for served, logprobs in engine.commit(push.policy_version, probe, timeout_s):
            if {*served} != {push.identity}:
                raise RunError(f"the engine serves weights {sorted(served)}, the trainers have {push.identity}")
            gap = self._monitor.measure(push.policy_version, logprobs) if self.probe else None
            if gap is not None:
                gaps.append(gap.max)
                if problem := self._monitor.probe_problem(push.policy_version, logprobs, gap):
                    raise RunError(problem)
        return replace(push, gap=max(gaps, default=None), seconds=push.seconds + time.perf_counter() - begin)
