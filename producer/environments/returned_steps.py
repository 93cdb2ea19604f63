"""Check what an episode returned, and make an `Observation` or a `Step` of it.

Numbers of NumPy and torch are taken as Python's. Whatever else there is a rule against is an EpisodeFailure, whose
message names the value: the episode is then invalid, and not scored with a number that nobody meant.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from coati_rl.text import shorten
from coati_rl.types import MAX_REWARD
from producer.environments.episode import EpisodeFailure, Message, Observation, Step

ONE_REWARD = "env"  # the name of a reward that has none
_MAX_INFO_CHARS = 1 << 16  # of the JSON of an info, which is written with the rollouts
_FORMS = "a Step, or (observation, reward, done, info)"


def as_observation(value: object) -> Observation:
    """Return text, messages, token ids, or None for nothing. Raises: EpisodeFailure."""
    value = _plain(value)
    if value is None or isinstance(value, str):
        return None if value is None else _encodable(value)
    if isinstance(value, Mapping):
        return [_message(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        items = [_plain(item) for item in value]
        if not items:
            return None
        if all(isinstance(item, Mapping) for item in items):
            return [_message(item) for item in items]
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            return items
    raise EpisodeFailure(f"the observation is {_shown(value)}; return text, messages, token ids or None")


def as_start(value: object) -> Step:
    """Return what `reset` returned as a Step of an observation and a sampling. Raises: EpisodeFailure."""
    if isinstance(value, Step):
        return Step(observation=as_observation(value.observation), sampling=_sampling(value.sampling))
    return Step(observation=as_observation(value))


def as_step(value: object) -> Step:
    """Return what `step` returned as a Step of plain values. Raises: EpisodeFailure."""
    full = value if isinstance(value, Step) else Step()
    if isinstance(value, Step):
        parts: tuple[Any, ...] = (value.observation, value.reward, value.done, value.info)
    elif isinstance(value, tuple) and len(value) in (3, 4):
        parts = (*value, {})[:4]
    elif isinstance(value, tuple) and len(value) == 5:  # Gymnasium's: terminated or truncated
        observation, reward, terminated, truncated, info = value
        parts = (observation, reward, _flag(terminated) or _flag(truncated), info)
    else:
        raise EpisodeFailure(f"step returned {_shown(value)}; return {_FORMS}")
    observation, reward, done, info = parts
    is_done = _flag(done)
    return Step(
        observation=None if is_done else as_observation(observation),
        reward=_rewards(reward),
        done=is_done,
        info=as_info(info),
        sampling=_sampling(full.sampling),
        answer=None if full.answer is None else _answer(full.answer),
        filter_score=None if full.filter_score is None else _reward(full.filter_score, "filter_score"),
        metrics={_name(name, "metric"): _metric(each, name) for name, each in full.metrics.items()},
    )


def as_info(value: object) -> dict[str, Any]:
    """Return an info as JSON types, with text in the place of other values. Raises: EpisodeFailure for no mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EpisodeFailure(f"info is {_shown(value)}; return a dictionary")
    try:
        text = json.dumps({str(key): item for key, item in value.items()}, default=_json_value)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailure(f"info is no JSON: {error}") from error
    if len(text) > _MAX_INFO_CHARS:
        return {"info": f"{shorten(text, 200)} ({len(text)} characters, {_MAX_INFO_CHARS} are kept)"}
    info: dict[str, Any] = json.loads(text, parse_constant=str)
    return info


def as_rewards(value: object) -> dict[str, float]:
    """Return rewards by name, None for nothing. Raises: EpisodeFailure."""
    return {} if value is None else _rewards(value)


def rewards_of(step: Step) -> dict[str, float]:
    """Return the rewards of a step by name; a single one is ONE_REWARD. Raises: EpisodeFailure."""
    return _rewards(step.reward)


def _rewards(value: object) -> dict[str, float]:
    """Return rewards by name; a single one is ONE_REWARD."""
    if isinstance(value, Mapping):
        return {_name(name): _reward(each, f"reward {name!r}") for name, each in value.items()}
    return {ONE_REWARD: _reward(value, "reward")}


def _name(name: object, what: str = "reward") -> str:
    text = str(name)
    if not is_encodable(text):
        raise EpisodeFailure(f"{what} {text!r}: a name must be text that UTF-8 can hold")
    return text


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can hold a text: half of a surrogate pair it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _reward(value: object, name: str) -> float:
    number = _plain(value)
    if not isinstance(number, int | float) or not math.isfinite(number) or abs(number) > MAX_REWARD:
        raise EpisodeFailure(f"{name} is {_shown(value)}; return a finite number of at most {MAX_REWARD:g}")
    return float(number)


def _metric(value: object, name: str) -> float:
    number = _plain(value)
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise EpisodeFailure(f"metric {name!r} is {_shown(value)}; return a finite number")
    return float(number)


def _flag(value: object) -> bool:
    flag = _plain(value)
    if isinstance(flag, bool) or flag in (0, 1):
        return bool(flag)
    raise EpisodeFailure(f"done is {_shown(value)}; return True or False")


def _sampling(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise EpisodeFailure(f"sampling is {_shown(value)}; return a dictionary, or None")
    return {str(name): _plain(item) for name, item in value.items()}


def _answer(value: object) -> Message:
    if not isinstance(value, Mapping) or value.get("role") != "assistant":
        raise EpisodeFailure(
            f"the answer of a Step is {_shown(value)}; return a message of the role assistant, or None"
        )
    return _message(value)


def _message(value: Mapping[Any, Any]) -> Message:
    if not isinstance(value.get("role"), str):
        raise EpisodeFailure(f"a message is {_shown(value)}; it needs a role")
    try:
        message: Message = json.loads(_encodable(json.dumps(dict(value), ensure_ascii=False, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailure(f"a message is no JSON: {error}") from error
    return message


def _encodable(text: str) -> str:
    if not is_encodable(text):
        raise EpisodeFailure("the observation is no text that can be encoded: it holds half of a surrogate pair")
    return text


def _plain(value: Any) -> Any:
    """Return an array or a tensor as a list, a number of one as Python's; they are known by their methods."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _json_value(value: Any) -> Any:
    plain = _plain(value)
    return shorten(repr(value), 200) if plain is value else plain


def _shown(value: object) -> str:
    return f"{shorten(repr(value))} ({type(value).__name__})"
