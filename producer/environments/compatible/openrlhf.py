"""Play OpenRLHF's `AgentInstance`: reset and step of texts, with what it does not say of the sampling left as it is.

Source: the README of github.com/OpenRLHF/OpenRLHF, section Multi-Turn Agent, and its openrlhf/utils/agent.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from coati_rl.stand_ins.openrlhf import finished, make_instance, refuse_images
from producer.environments.compatible.sampling import changes_of, params_of
from producer.environments.episode import Action, EpisodeFailure, EpisodeTask, Observation, Step


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
        self._agent = await make_instance(made, **arguments)
        self._text, self._label, self._sampling = task.prompt, task.ground_truth, task.sampling
        self._params: Any = params_of(task.sampling)
        returned = await finished(self._agent.reset({"observation": task.prompt, "label": task.ground_truth}))
        if not isinstance(returned, Mapping) or not isinstance(returned.get("observation"), str):
            raise EpisodeFailure('reset has to return {"observation": text}')
        self._text = returned["observation"]
        return None if self._text == task.prompt else self._text

    async def step(self, action: Action) -> Step:
        """Return the feedback, and what it rewards.

        The sampling that a step has changed holds until another one changes it, but for max_tokens, of one turn.
        """
        if hasattr(self._params, "max_tokens"):
            self._params.max_tokens = self._sampling["max_new_tokens"]
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": self._params,
        }
        returned = await finished(self._agent.step(states))
        missing = {"rewards", "environment_feedback", "done"} - set(returned if isinstance(returned, Mapping) else ())
        if missing:
            raise EpisodeFailure(f"step has to return a dictionary; it lacks {', '.join(sorted(missing))}")
        refuse_images(returned)
        feedback = returned["environment_feedback"]
        self._text += action.text + str(feedback)
        extra = {"scores": returned["scores"]} if "scores" in returned else {}
        logs = returned.get("extra_logs") or {}
        if returned.get("sampling_params") is not None:
            self._params = returned["sampling_params"]
        return Step(
            observation=feedback,
            reward=one_number(returned["rewards"]),
            done=one_number(returned["done"]),
            info={**extra, **logs},
            sampling=changes_of(self._params, self._sampling),
            filter_score=one_number(returned.get("scores")),
            metrics=numbers_of(logs),
        )

    async def close(self) -> None:
        """Close the object if it can be."""
        close = getattr(self._agent, "close", None)
        if callable(close):
            await finished(close())


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of OpenRLHF's `extra_logs`, by name; of other values there is no mean."""
    numbers = {str(name): one_number(value) for name, value in logs.items()}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float) and math.isfinite(value)}


def one_number(value: Any) -> Any:
    """Return a tensor or an array of one number as that number, anything else as it is."""
    tolist = getattr(value, "tolist", None)
    plain = tolist() if callable(tolist) else value
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain
