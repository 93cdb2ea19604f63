"""Play OpenRLHF's `AgentExecutor.execute`, which asks the engine with token ids.

Source: the README of github.com/OpenRLHF/OpenRLHF, section Multi-Turn Agent, and its openrlhf/utils/agent.py.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from producer.environments.compatible.driven import Asking, Ended
from producer.environments.compatible.openrlhf import SamplingParams, one_number, sampling_of
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import EpisodeFailure, EpisodeTask

ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")


@dataclass(frozen=True, slots=True)
class _Output:
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: None = None


@dataclass(frozen=True, slots=True)
class _RequestOutput:
    outputs: list[_Output]


class _Engine:
    """Stand in for the engine that `execute` is given."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def generate(self, prompt_token_ids: Any, sampling_params: Any = None, **other: Any) -> _RequestOutput:
        """Sample an answer to token ids."""
        if other or isinstance(prompt_token_ids, str):
            raise EpisodeFailure("llm_engine.generate takes token ids and sampling_params, and nothing else")
        ids = [int(token_id) for token_id in prompt_token_ids]
        action = await asyncio.wrap_future(self._asking.ask(ids, sampling_of(sampling_params)))
        return _RequestOutput([_Output(list(action.token_ids), action.text, action.finish_reason)])


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
            task.prompt, task.ground_truth, SamplingParams(), self._limits.max_tokens, self._limits.tokenizer(),
            _Engine(asking),
        )  # fmt: skip
        self._returned = asyncio.run(self._make().execute(**dict(zip(ARGUMENTS, values, strict=True))))
        if not isinstance(self._returned, Mapping) or self._returned.get("reward") is None:
            raise EpisodeFailure("execute has to return a dictionary with a reward (0.0 where another gives it)")
        scores = {"scores": self._returned["scores"]} if "scores" in self._returned else {}
        return Ended(
            reward=one_number(self._returned["reward"]), info={**scores, **(self._returned.get("extra_logs") or {})}
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

    def truncated(self) -> Any:
        """Raise: only `execute` knows the reward, and it is not at its end."""
        raise EpisodeFailure(
            "execute still asked when the limit was reached, so that there is no reward; have it end earlier, or use a "
            "larger --max-turns or --max-episode-tokens"
        )
