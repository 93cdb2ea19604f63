"""Ask engines for completions of prompts, and for training samples of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from coati_rl.config import Config
from coati_rl.errors import ConfigError, EngineError, RolloutError
from coati_rl.members import Members
from coati_rl.reading.chat_template import apply_chat_template
from coati_rl.reading.conversations import leading_ids
from coati_rl.samples import CUT_OFF, PENALIZED, Sample
from coati_rl.types import CUTS, GenerationRequest, SamplingParams
from coati_rl.types import Completion as EngineCompletion
from producer.environments.step_sampling import with_call_sampling

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or a conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion(EngineCompletion):
    """Hold one completion of a prompt, with what a training sample of it needs."""

    prompt_ids: np.ndarray  # int32[P], the same object in all completions of the prompt
    uid: str  # of the prompt among all of its engine
    number: int  # among the prompt's completions, from 0
    temperature: float  # that it was sampled at
    marks: tuple[str, ...] = ()  # CUT_OFF, PENALIZED

    def sample(self, advantage: float | np.ndarray, **arrays: float | np.ndarray) -> Sample:
        """Return the sample that trains it.

        Args:
            advantage: of all its tokens, or float32[T].
            arrays: others that a loss reads, a number or [T] each.
        """
        return Sample(
            uid=self.uid,
            number=self.number,
            prefix_ids=self.prompt_ids,
            token_ids=self.token_ids,
            loss_mask=np.ones(len(self.token_ids), dtype=bool),
            arrays={
                "advantages": advantage,
                "rollout_logprobs": self.logprobs,
                "temperature": self.temperature,
                "policy_version": self.policy_versions,
                **dict.fromkeys(self.marks, 1.0),
                **arrays,
            },
        )

    def token_rewards(self, reward: float) -> dict[str, np.ndarray | float]:
        """Return the arrays that a critic learns from: the reward at the last token, and whether a limit cut it."""
        rewards = np.zeros(len(self.token_ids), dtype=np.float32)
        rewards[-1:] = reward
        return {"token_rewards": rewards, "is_cut": float(self.finish_reason == "length")}


_CLIENTS = count()


class EngineClient:
    """Share prompts out to engines, each an `EngineMember`, and let them receive weights."""

    def __init__(self, config: Config, tokenizer: Any, members: Members) -> None:
        """Use engines of these settings and this tokenizer."""
        self.tokenizer, self.members = tokenizer, members
        self.number = next(_CLIENTS)  # among those of this program
        self._config = config
        self._numbers, self._num_samples = count(), 0
        self.last_tokens: list[int] = []  # a prompt that was answered last, with an answer
        self.is_asleep = False
        self._wake: Callable[[], Any] | None = None  # of an update that was staged while it slept
        self.policy_version = 0  # of the weights that it received last

    def generate(
        self, prompts: Sequence[Prompt], n: int = 1, *, timeout_s: float = 3600.0, **sampling: Any
    ) -> list[list[Completion]]:
        """Return `n` completions of each prompt, in order; the same ones whatever the number of engines.

        Args:
            prompts: text is continued as it is, a conversation is answered by the model's chat template.
            n: completions of each.
            timeout_s: time limit, in seconds.
            sampling: fields of `SamplingParams` in place of the engine's own; a seed counts up by sample.
        Raises: ConfigError for a field that there is not, or a value of another type; EngineError if a prompt is
            refused, the time is over or the engine sleeps.
        """
        if self.is_asleep:
            raise EngineError("the engine sleeps: trainer.push_to(engine), then engine.wake()")
        own = self._config.sampling
        base = SamplingParams(
            temperature=own.temperature,
            max_new_tokens=own.max_new_tokens,
            stop=tuple(own.stop),
            seed=self._config.run.seed + self._num_samples,
            **{name: getattr(own, name) for name in CUTS},
        )
        try:
            base = with_call_sampling(base, sampling)
        except RolloutError as error:
            raise ConfigError(str(error)) from error
        self._num_samples += n * len(prompts)
        requests = [
            GenerationRequest(
                request_id=f"prompt-{next(self._numbers)}",
                token_ids=tuple(self._token_ids(prompt)),
                num_samples=n,
                sampling=replace(base, seed=base.seed + n * index),
            )
            for index, prompt in enumerate(prompts)
        ]
        size = self.members.size
        shares = [(requests[place::size], timeout_s) for place in range(size)]
        answers = self.members.call("generate", shares)
        found = [_completions(request, answers[index % size][index // size]) for index, request in enumerate(requests)]
        if found:
            self.last_tokens = [*map(int, (*found[0][0].prompt_ids, *found[0][0].token_ids))]
        return found

    def begin_staging(self, manifest: str, invitations: Sequence[str], timeout_s: float) -> Callable[[], list[Any]]:
        """Receive an update beside the serving weights. Returns: a function that waits for the engines' digests."""
        return self.members.begin("stage", [(manifest, invitation, timeout_s) for invitation in invitations])

    def commit(self, policy_version: int, probe: Sequence[int], timeout_s: float) -> list[Any]:
        """Serve what is staged. Returns: of each engine what `EngineMember.commit` returns."""
        found = self.members.call("commit", [(policy_version, probe, timeout_s)] * self.members.size)
        self.is_asleep, self._wake = False, None
        return found

    def sleep(self, *, timeout_s: float = 60.0) -> None:
        """Give up the memory of weights and caches, for a trainer on the same device; RLite's word is `meta`.

        Weights come with the next `trainer.push_to(engine)`, and the memory of the cache with `wake` after it.

        Raises: ConfigError on a GPU if the engine was not made with colocate=True.
        """
        self.members.call("sleep", [(timeout_s,)] * self.members.size)
        self.is_asleep, self._wake = True, None

    meta = sleep

    def wake_by(self, wake: Callable[[], Any]) -> None:
        """Have `wake` commit what was staged, when the device is free for it."""
        self._wake = wake

    def wake(self) -> Any:
        """Serve what was pushed while the engine slept. Returns: the `coati.Push`. Raises: EngineError without one."""
        if self._wake is None:
            raise EngineError("the engine has no weights to wake with: trainer.push_to(engine) while it sleeps")
        return self._wake()

    def cuda(self, part: Literal["weights", "kv_cache"] | None = None) -> None:
        """Wake in RLite's words: with the cache, or whole. Weights get their memory when they are pushed."""
        if part not in ("weights", "kv_cache", None):
            raise ConfigError(f'engine.cuda("{part}"): an engine has weights and kv_cache')
        if part != "weights" and self.is_asleep:
            self.wake()

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the longest prompt and its completion."""
        return self._config.max_model_len

    @property
    def ranks(self) -> list[int]:
        """Return the number of ranks of each engine."""
        return [self._config.parallel.producer_tensor_parallel_size] * self.members.size

    def close(self) -> None:
        """End the engines."""
        self.members.call("close", [()] * self.members.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            own = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            return [*leading_ids(prompt, self.tokenizer), *own]
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if not messages:
            return [part for part in prompt if not isinstance(part, Mapping)]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [*apply_chat_template(self.tokenizer, messages, "a prompt", **options)]


def _completions(request: GenerationRequest, answers: Sequence[dict[str, Any]]) -> list[Completion]:
    sampling = request.sampling
    shared: dict[str, Any] = {
        "prompt_ids": np.array(request.token_ids, dtype=np.int32),
        "uid": request.request_id,
        "temperature": sampling.temperature,
        "marks": _marks(sampling),
    }
    return [Completion(number=number, **shared, **answer) for number, answer in enumerate(answers)]


def _marks(sampling: SamplingParams) -> tuple[str, ...]:
    plain = SamplingParams()
    is_cut_off = any(getattr(sampling, name) != getattr(plain, name) for name in CUTS)
    is_penalized = sampling.repetition_penalty != plain.repetition_penalty
    return (CUT_OFF,) * is_cut_off + (PENALIZED,) * is_penalized
