"""Offer RLite's names over this library, so that its programs run here: `import coati.rlite as rlite`.

Engines and trainers are `coati.Engine` and `coati.ModuleTrainer`: in this process, in those of torchrun, or after
`init(trainers=..., engines=...)` in actors of Ray. `tensor_parallel_size` of a trainer is its number of ranks, over
which FSDP2 shards the module. Source of names and meanings: RLite's README.
"""

import atexit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import coati
from coati_rl.errors import ConfigError
from consumer.own_module import Split as NeedParallel
from producer.engine_client import Completion, Prompt

__all__ = ["NeedParallel", "RliteInferenceEngine", "RliteTrainEngine", "init", "nn"]

_NEW_TOKENS = 16  # vLLM's default, which RLite's engines have
_cluster: Any = None


def init(**flags: Any) -> None:
    """Use actors of Ray from now on, if there are `flags`, which are those of `coati.cluster`; else this process."""
    global _cluster
    if flags and _cluster is None:
        stack = ExitStack()
        _cluster = stack.enter_context(coati.cluster(**{"colocate": True, **flags}))
        atexit.register(stack.close)


class HuggingFaceFsdp2TrainModule:
    """Mark a module that `RliteTrainEngine` trains; it may define `on_weights_materialized`."""


nn = SimpleNamespace(HuggingFaceFsdp2TrainModule=HuggingFaceFsdp2TrainModule)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Hold an answer, in vLLM's form."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of the sampled tokens
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Hold the answers to one prompt, in vLLM's form."""

    outputs: list[CompletionOutput]


class RliteInferenceEngine:
    """Generate answers."""

    engine: coati.Engine

    def __init__(self, model: str, executor: str = "vllm", **flags: Any) -> None:
        """Store what `build` loads. `executor`: as --backend; `flags`: of `coati.Engine`."""
        self._model, self._executor, self._flags = model, executor, flags

    def build(self, tensor_parallel_size: int = 1) -> None:
        """Load the model. Raises: ConfigError, EngineError."""
        flags = {"max_new_tokens": _NEW_TOKENS, "colocate": True, **self._flags}
        flags["producer_tensor_parallel_size"] = tensor_parallel_size
        self.engine = coati.Engine(self._model, on=_cluster, backend=self._executor, **flags)

    def generate(self, prompts: Sequence[Prompt], n: int = 1, **sampling: Any) -> list[RequestOutput]:
        """See `EngineClient.generate`."""
        found = self.engine.generate(prompts, n, **sampling)
        return [RequestOutput([_output(answer) for answer in answers]) for answers in found]

    def meta(self) -> None:
        """Give up weights and cache."""
        self.engine.meta()

    def cuda(self, part: Any = None) -> None:
        """See `EngineClient.cuda`."""
        self.engine.cuda(part)


def _output(answer: Completion) -> CompletionOutput:
    return CompletionOutput(answer.token_ids.tolist(), answer.logprobs.tolist(), answer.text, answer.finish_reason)


class RliteTrainEngine:
    """Train a module: its methods are this object's, and their results a list, one for each rank."""

    trainer: coati.ModuleTrainer

    def __init__(self, module: Any, executor: str = "fsdp2") -> None:
        """Store what `build` loads.

        Args:
            module: on the meta device, of a class of the user's; weights are read from where its config came from.
            executor: "fsdp2".
        """
        if executor != "fsdp2":
            raise ConfigError(f'RliteTrainEngine(executor="{executor}"): there is "fsdp2"')
        self._class, self._model = type(module), module.config.name_or_path

    def build(self, tensor_parallel_size: int = 1, colocate_with: RliteInferenceEngine | None = None) -> None:
        """Load the module on this many ranks; they share devices with engines, which sleep meanwhile.

        Raises: ConfigError if there are more or fewer ranks.
        """
        self.trainer = coati.ModuleTrainer(self._class, self._model, on=_cluster)
        if self.trainer.members.size != tensor_parallel_size:
            raise ConfigError(
                f"build(tensor_parallel_size={tensor_parallel_size}): there are {self.trainer.members.size} ranks; use "
                f"rlite.init(trainers={tensor_parallel_size}), or as many processes of torchrun"
            )

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("_") or name == "trainer":
            raise AttributeError(name)
        return lambda *arguments: self.trainer.call(name, *arguments)

    def p2p_weight_sync(self, engine: RliteInferenceEngine) -> coati.Push:
        """See `ModuleTrainer.push_to`."""
        return self.trainer.push_to(engine.engine)

    def cpu(self) -> None:
        """Take the module and its optimizer off the device."""
        self.trainer.cpu()

    def cuda(self, *parts: Any) -> None:
        """See `OffloadClient.cuda`."""
        self.trainer.cuda(*parts)

    def meta(self) -> None:
        """Drop the module."""
        self.trainer.meta()
