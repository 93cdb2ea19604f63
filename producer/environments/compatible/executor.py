"""Play OpenRLHF's `AgentExecutor.execute`, which asks the engine with token ids.

Source: the README of github.com/OpenRLHF/OpenRLHF, section Multi-Turn Agent, and its openrlhf/utils/agent.py.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from producer.environments.compatible.driven import Asking, Ended
from producer.environments.compatible.openrlhf import numbers_of, one_number
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.compatible.sampling import changes_of, params_of
from producer.environments.episode import EpisodeFailure, EpisodeTask

ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
NOTHING = ("images", "multi_modal_data")  # that later versions pass, too: there are none


@dataclass(frozen=True, slots=True)
class _Output:
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: None = None
    index: int = 0
    stop_reason: None = None


@dataclass(frozen=True, slots=True)
class _RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[_Output]
    finished: bool = True


class _Engine:
    """Stand in for the engine that `execute` is given."""

    partial_rollout = False  # answers are whole: an update of the weights does not end them

    def __init__(self, asking: Asking, sampling: Mapping[str, Any]) -> None:
        self._asking = asking
        self._sampling = sampling

    async def generate(self, prompt_token_ids: Any, sampling_params: Any = None, **other: Any) -> _RequestOutput:
        """Sample an answer to token ids."""
        if given := [name for name, value in other.items() if value]:
            raise EpisodeFailure(
                f"llm_engine.generate takes token ids and sampling_params, and not {given[0]}; only text is supported"
            )
        if isinstance(prompt_token_ids, Mapping):  # vLLM's TokensPrompt
            prompt_token_ids = prompt_token_ids["prompt_token_ids"]
        if isinstance(prompt_token_ids, str):
            raise EpisodeFailure("llm_engine.generate takes token ids, and not text")
        ids = [int(token_id) for token_id in prompt_token_ids]
        action = await asyncio.wrap_future(self._asking.ask(ids, changes_of(sampling_params, self._sampling)))
        return _RequestOutput(ids, [_Output(list(action.token_ids), action.text, action.finish_reason)])

    def get_weight_version(self) -> int:
        """Return one version for all tokens: the run records those that sampled them."""
        return 0


class ExecutorAgent:
    """Implement `Agent` with an object of the user's class, made for each episode.

    Args:
        make: the class with its arguments.
        limits: of the run.
    """

    def __init__(self, make: Callable[[], Any], limits: RunLimits) -> None:
        self._make = make
        self._limits = limits
        self._returned: Mapping[str, Any] = {}

    def run(self, task: EpisodeTask, asking: Asking) -> Ended:
        """Execute it in an event loop of its own."""
        values = (
            task.prompt, task.ground_truth, params_of(task.sampling), self._limits.max_tokens,
            self._limits.tokenizer(), _Engine(asking, task.sampling),
        )  # fmt: skip
        execute = self._make().execute
        named = dict(zip(ARGUMENTS, values, strict=True))
        named |= dict.fromkeys(name for name in NOTHING if name in inspect.signature(execute).parameters)
        self._returned = asyncio.run(execute(**named))
        if not isinstance(self._returned, Mapping) or self._returned.get("reward") is None:
            raise EpisodeFailure("execute has to return a dictionary with a reward (0.0 where another gives it)")
        scores = {"scores": self._returned["scores"]} if "scores" in self._returned else {}
        logs = self._returned.get("extra_logs") or {}
        return Ended(
            reward=one_number(self._returned["reward"]),
            info={**scores, **logs},
            filter_score=one_number(self._returned.get("scores")),
            metrics=numbers_of(logs),
        )

    def check(self, token_ids: list[int], turns: list[tuple[int, int]], returned: Ended) -> None:
        """Compare observation_tokens and action_ranges with the record. Raises: EpisodeFailure."""
        told = self._returned.get("observation_tokens")
        if told is not None and list(told)[: len(token_ids)] != token_ids:
            raise EpisodeFailure("the observation_tokens that execute returned are not those that were sampled")
        ranges = self._returned.get("action_ranges")
        if ranges is not None and [tuple(each) for each in ranges] != turns:
            raise EpisodeFailure(
                f"execute returned action_ranges {list(ranges)}, and the policy was asked for {turns}: all that it "
                "sampled is trained"
            )
        if not all(self._returned.get("action_loss_mask") or ()):
            raise EpisodeFailure("execute returned an action_loss_mask with zeros: all that was sampled is trained")

    def truncated(self) -> Any:
        """Raise: only `execute` knows the reward, and it is not at its end."""
        raise EpisodeFailure(
            "execute still asked when the limit was reached, so that there is no reward; have it end earlier, or use a "
            "larger --max-turns or --max-episode-tokens"
        )
