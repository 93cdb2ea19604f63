"""Play OpenRLHF's `AgentInstance`: reset and step of texts, with what it does not say of the sampling left as it is.

Source: the README of github.com/OpenRLHF/OpenRLHF, section Multi-Turn Agent, and its openrlhf/utils/agent.py.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from producer.environments.episode import Action, EpisodeFailure, EpisodeTask, Observation, Step

_UNSUPPORTED = ("min_p", "logit_bias", "guided_decoding", "structured_outputs", "repetition_penalty")
_NEUTRAL = (None, 0, 0.0, 1.0)


@dataclass(slots=True)
class SamplingParams:
    """Stand in for vLLM's: what is None is as the run's flags say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None  # recorded by the run, and not given to the agent


class AgentInstanceEpisode:
    """Implement `Episode` with an object of the user's class.

    Args:
        make: returns the class, and the arguments of its constructor, which may be async.
    """

    def __init__(self, make: Callable[[], tuple[Any, Mapping[str, Any]]]) -> None:
        self._make = make
        self._agent: Any = None

    async def reset(self, task: EpisodeTask) -> Observation:
        """Make the object. Returns: its observation; None if it is the prompt."""
        made, arguments = self._make()
        self._agent = made.__new__(made)
        await _finished(self._agent.__init__(**arguments))
        self._text, self._label = task.prompt, task.ground_truth
        returned = await _finished(self._agent.reset({"observation": task.prompt, "label": task.ground_truth}))
        if not isinstance(returned, Mapping) or not isinstance(returned.get("observation"), str):
            raise EpisodeFailure('reset has to return {"observation": text}')
        self._text = returned["observation"]
        return None if self._text == task.prompt else self._text

    async def step(self, action: Action) -> Step:
        """Return the feedback, and what it rewards."""
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": SamplingParams(),
        }
        returned = await _finished(self._agent.step(states))
        missing = {"rewards", "environment_feedback", "done"} - set(returned if isinstance(returned, Mapping) else ())
        if missing:
            raise EpisodeFailure(f"step has to return a dictionary; it lacks {', '.join(sorted(missing))}")
        feedback = returned["environment_feedback"]
        self._text += action.text + str(feedback)
        extra = {"scores": returned["scores"]} if "scores" in returned else {}
        return Step(
            observation=feedback,
            reward=one_number(returned["rewards"]),
            done=one_number(returned["done"]),
            info={**extra, **(returned.get("extra_logs") or {})},
            sampling=sampling_of(returned.get("sampling_params")),
        )

    async def close(self) -> None:
        """Close the object if it can be."""
        close = getattr(self._agent, "close", None)
        if callable(close):
            await _finished(close())


def sampling_of(params: Any) -> dict[str, Any] | None:
    """Return the sampling of a turn from vLLM's object, ours or a dictionary. Raises: EpisodeFailure."""
    if params is None:
        return None
    names = [each.name for each in fields(SamplingParams)] + list(_UNSUPPORTED)
    given = params if isinstance(params, Mapping) else {name: getattr(params, name, None) for name in names}
    if refused := [name for name in _UNSUPPORTED if given.get(name) not in _NEUTRAL]:
        raise EpisodeFailure(f"sampling_params: {refused[0]} is not supported; leave it out")
    if given.get("n") not in (None, 1):
        raise EpisodeFailure(f"sampling_params: n={given['n']} answers to a turn; use 1, and -g for the group")
    sampling = {name: given.get(name) for name in ("temperature", "top_p", "top_k", "stop", "seed")}
    sampling["max_new_tokens"] = given.get("max_tokens", given.get("max_new_tokens"))
    if sampling["top_k"] in (-1, 0):
        sampling["top_k"] = None
    return {name: value for name, value in sampling.items() if value not in (None, [], ())} or None


def one_number(value: Any) -> Any:
    """Return a tensor or an array of one number as that number, anything else as it is."""
    tolist = getattr(value, "tolist", None)
    plain = tolist() if callable(tolist) else value
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain


async def _finished(returned: Any | Awaitable[Any]) -> Any:
    return await returned if inspect.isawaitable(returned) else returned
