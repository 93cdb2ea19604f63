"""Place engines: in this process, in each of torchrun's, or on a cluster."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coati.settings import device_of, model_dir, tokenizer_of
from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.preflight.adapter import with_adapter
from consumer.parallel.own_member import OwnMember, join_torchrun
from producer.engine_client import EngineClient
from producer.engine_member import EngineMember
from producer.engines import engine_environment

if TYPE_CHECKING:
    from coati.ray_cluster import Cluster


class Engine(EngineClient):
    """Generate completions of a model whose weights a trainer replaces."""

    def __init__(
        self,
        model: str | Path,
        *,
        on: "Cluster | None" = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        **flags: Any,
    ) -> None:
        """Load the model.

        Args:
            model: directory, or hub id.
            on: a cluster, on whose engines it is loaded; None: this process, and each other one of torchrun.
            device: of this process's engine.
            flags: of `coati-rl rl`, such as backend, max_prompt_tokens, max_new_tokens, temperature, seed.
        Raises: ConfigError, with a line for each mistake; EngineError.
        """
        config = with_adapter(build_job({"num_trainers": 1, **flags, "model": str(model_dir(model))}, Config))
        tokenizer = tokenizer_of(config)
        if on is not None:
            super().__init__(config, tokenizer, on.engines(config))
            return
        kind = device_of(device)
        join_torchrun(kind)
        for name, value in engine_environment(kind, config.parallel.producer_tensor_parallel_size).items():
            os.environ.setdefault(name, value)
        super().__init__(config, tokenizer, OwnMember(lambda: EngineMember(config, kind)))
