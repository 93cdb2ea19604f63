"""Place engines: in this process, in each of torchrun's, or on a cluster; or give one a trainer's own weights."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coati.settings import device_of, model_dir, tokenizer_of
from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.config.plan import resolve_precision
from coati_rl.errors import ConfigError
from coati_rl.preflight.adapter import with_adapter
from consumer.parallel.own_member import OwnMember, join_torchrun
from consumer.trainer_client import TrainerClient
from producer.engine_client import Completion, EngineClient, Prompt
from producer.engine_member import EngineMember
from producer.engines import engine_environment

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster


class Engine(EngineClient):
    """Generate completions of a model whose weights a trainer replaces."""

    def __init__(
        self,
        model: str | Path | TrainerClient,
        *,
        on: "Cluster | None" = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        **flags: Any,
    ) -> None:
        """Load the model.

        Args:
            model: directory, or hub id; or a trainer of this process, whose weights the engine reads without a copy, as
                they are at each call of `generate`.
            on: a cluster, on whose engines it is loaded; None: this process, and each other one of torchrun.
            device: of this process's engine.
            flags: of `coati-rl rl`, such as backend, max_prompt_tokens, max_new_tokens, temperature, seed.
        Raises: ConfigError, with a line for each mistake; EngineError.
        """
        self.follows: TrainerClient | None = None  # the trainer whose weights it reads
        if not isinstance(model, str | Path):
            self.follows, device = model, model.device
            flags |= _flags_of(model, on, **flags)
            model = model.config.model.model
        # Of an engine alone; those that share devices need as many trainers.
        flags["num_trainers"] = flags.get("producer_tensor_parallel_size", 1)
        config = with_adapter(build_job({**flags, "model": str(model_dir(model))}, Config))
        tokenizer = tokenizer_of(config)
        if on is not None:
            super().__init__(config, tokenizer, on.engines(config))
            return
        kind = device_of(device)
        join_torchrun(kind)
        for name, value in engine_environment(kind, config.parallel.producer_tensor_parallel_size).items():
            os.environ.setdefault(name, value)
        super().__init__(
            config, tokenizer, OwnMember(partial(EngineMember, config, kind, shares_weights=self.follows is not None))
        )
        self.follow()

    def follow(self) -> None:
        """Read the weights of the trainer that this engine was made of, as they are now."""
        if self.follows is not None:
            self.members.call("share", [(self.follows.live_weights(), self.follows.step)])
            self.is_asleep = False

    def generate(
        self, prompts: Sequence[Prompt], n: int = 1, *, timeout_s: float = 3600.0, **sampling: Any
    ) -> list[list[Completion]]:
        """See `EngineClient.generate`; an engine of a trainer has its weights, and its steps as policy version."""
        self.follow()
        return super().generate(prompts, n, timeout_s=timeout_s, **sampling)

    def commit(self, policy_version: int, probe: Sequence[int], timeout_s: float) -> list[Any]:
        """See `EngineClient.commit`; an engine of a trainer has nothing to commit, and no identity of what it reads."""
        if self.follows is None:
            return super().commit(policy_version, probe, timeout_s)
        self.follow()
        return [(("",), logprobs) for logprobs in self.members.call("probe", [(probe, timeout_s)])]


def _flags_of(trainer: TrainerClient, on: "Cluster | None", **flags: Any) -> dict[str, Any]:
    """Return the flags by which an engine can read a trainer's weights. Raises: ConfigError if none can."""
    if on is not None or not isinstance(trainer.members, OwnMember) or trainer.members.size > 1:
        raise ConfigError("Engine(trainer): its weights are in several processes; use Engine(model) and push_to")
    if trainer.config.lora.is_on:
        raise ConfigError("Engine(trainer): the trainer's adapters are merged when they are sent; use Engine(model)")
    if flags.get("backend", "transformers") != "transformers":
        raise ConfigError(f'Engine(trainer, backend="{flags["backend"]}"): only "transformers" has the same weights')
    return {"backend": "transformers", "precision": resolve_precision(trainer.config, trainer.device)}
