"""Place the ranks of a torch module of one's own, whose methods are the steps of training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coati.engine import Engine
from coati.push import Push, Pusher
from coati.settings import device_of, model_dir
from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.config.plan import resolve_dtype
from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings
from coati_rl.errors import ConfigError
from coati_rl.members import Members
from consumer.offload_client import PARTS, OffloadClient
from consumer.own_module import OwnModuleRank
from consumer.parallel.own_member import OwnMember, join_torchrun, torchrun_address

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster


class ModuleTrainer(OffloadClient):
    """Train a module by its own methods, over ranks that FSDP2 shards it over, and send its weights to engines."""

    after_meta = "make another ModuleTrainer of a checkpoint"

    def __init__(
        self,
        module: type,
        model: str | Path,
        *,
        on: "Cluster | None" = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        precision: Literal["fp32", "bf16"] | None = None,
        seed: int = 42,
    ) -> None:
        """Load the model, and let the module make its optimizer in `on_weights_materialized`, if it has that method.

        Args:
            module: a subclass of a causal language model class of transformers.
            model: directory, or hub id.
            on: a cluster, on whose trainers it is; None: this process, or all of torchrun.
            device: of this process.
            precision: of the weights; None: bf16 on GPUs, else fp32.
            seed: of random numbers, the same on all ranks.
        Raises: ConfigError.
        """
        self.device = kind = device_of(device) if on is None else on.device
        own = join_torchrun(kind) if on is None else None
        directory = model_dir(model)
        flags = {"model": str(directory), "precision": precision, "seed": seed, "kl_coeff": 0.0}
        config = build_job({**flags, "num_trainers": 1 if on is None else on.num_trainers, "plugin": "fsdp2"}, Config)
        members: Members = OwnMember(lambda: OwnModuleRank(own)) if on is None else on.trainers(config, OwnModuleRank)
        super().__init__(members)
        dtype = resolve_dtype(config, kind)
        address, in_turns = (torchrun_address(), False) if on is None else (on.address, on.takes_turns)
        self.each("build", module, directory, dtype, seed, address, in_turns)
        settings = MismatchSettings(precision="bf16" if dtype == "bfloat16" else "fp32")
        self._pusher = Pusher(self, LogprobMismatchMonitor(settings, SyncConfig()))
        self._module, self._num_pushes = module, 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the module on all ranks. Returns: what it returns on each.

        Args:
            method: name.
            arguments: of a `coati.Split` each rank gets its part, of others the same.
        Raises: ConfigError if the module has no such method; RunError if `cpu` has taken something off the device.
        """
        if not callable(getattr(self._module, method, None)):
            raise ConfigError(f"{self._module.__name__} has no method {method}")
        self.need(*PARTS)
        return self.each("call", method, arguments)

    def push_to(self, engine: Engine, *, timeout_s: float = 60.0) -> Push:
        """Let the engine serve the weights, checked by digests, and by the log-probabilities of what it answered last.

        Its policy version is the number of pushes. For one that sleeps see `Trainer.push_to`.

        Raises: TransferError; RunError if bytes or log-probabilities differ.
        """
        self._num_pushes += 1
        probe = engine.last_tokens[: engine.max_tokens - 1]
        return self._pusher.push(engine, self._num_pushes, probe, timeout_s=timeout_s)

    def save(self, directory: str | Path) -> None:
        """Write the weights as a Hugging Face checkpoint, without a tokenizer."""
        self.need("weights")
        self.each("save", Path(directory).absolute())
