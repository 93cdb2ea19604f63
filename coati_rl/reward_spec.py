"""Parse the reward type, the text of `-rt`: named rewards with their weights.

A reward is built in, a user's function (FILE.py:FUNCTION), a reward model that the run loads (model:DIRECTORY), or a
served one (http://...). Several are joined by commas, each with its weight: `boxed=1,brevity.py:score=0.2`. The first
decides whether a response is correct.

A comma always separates rewards. The last `=NUMBER` is a weight, except in a URL's query, whose own `name=value` has
precedence: `http://host/score?k=3` has weight 1, `http://host/score?k=3=0.5` has 0.5. What follows the `=` of a
directory is a weight only if it is a number.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from coati_rl.errors import ConfigError
from coati_rl.generator_spec import GENERATED
from coati_rl.plugins import absolute, is_plugin
from coati_rl.reward_url import check_no_credentials, redacted

BUILT_IN_REWARDS = ("think_answer_tags", "boxed", "code", GENERATED)
NO_REWARD = "none"  # every response has reward 0, and rows need no ground truth; for distillation
ENVIRONMENT_REWARD = "env"  # the rewards of the environment (--env), and no others
TIMEOUT_S = 5.0  # a comparison of answers takes milliseconds; one that takes this long does not end
LONG_TIMEOUT_S = 60.0  # for programs, other machines, and user functions, which may load a model
MathAnswer = Literal["number", "any"]
MATH_REWARDS = ("think_answer_tags", "boxed")
BINARY_REWARDS = (*MATH_REWARDS, "code")  # their score is 1 or 0
_MODEL = "model:"  # before the directory of a reward model
_CHOICES = (
    f"{', '.join(BUILT_IN_REWARDS)}, FILE.py:FUNCTION, {_MODEL}DIRECTORY or http(s)://..., or "
    f"{ENVIRONMENT_REWARD} or {NO_REWARD} alone"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """Name one reward of a run, with its weight."""

    name: str  # built in, FILE.py:FUNCTION, model:DIRECTORY or a URL
    weight: float = 1.0  # in the sum; 0 only reports the value


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """Hold all that a scoring process needs to build its reward, as JSON types."""

    reward_type: str  # as of -rt
    timeout_s: float = TIMEOUT_S  # wall time that one response may take
    math_answer: MathAnswer = "number"  # kinds of answers to a numeric ground truth
    correct_from: float = 1.0  # reward that makes an answer correct if its function or model does not say whether it is
    group_timeout_s: float | None = None  # wall time of a group that is scored in one call; None: the same
    test_timeout_s: float = 10.0  # CPU seconds that a program may take for one test (code)
    test_memory_mb: int = 1024  # memory that it may take, MiB
    is_sandboxed: bool = True  # False: programs run with the user's rights
    combine: str | None = None  # FILE.py:FUNCTION that makes one reward of several; None: the weighted sum
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # values of the variables in addresses


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardColumns:
    """Name the columns of a row that a reward reads besides messages and ground truth."""

    required: tuple[str, ...] = ()  # that every row must have
    are_kept: bool = False  # rows keep their columns for it

    def __or__(self, other: "RewardColumns") -> "RewardColumns":
        """Return the columns that either of two rewards reads."""
        required = dict.fromkeys((*self.required, *other.required))
        return RewardColumns(required=tuple(required), are_kept=self.are_kept or other.are_kept)


NO_COLUMNS = RewardColumns()


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardActors:
    """Name the actors of a run that hold the copies of its reward models."""

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of each model's copies, by its directory
    num_gpus: int = 0  # of all of them, in GPU mode

    @staticmethod
    def of(directories: Sequence[str], *, num_devices: int) -> "RewardActors":
        """Return `num_devices` copies of each model, on a GPU each; 0: one copy, on the CPU."""
        copies, names = max(1, num_devices), dict[str, tuple[str, ...]]()
        for directory in dict.fromkeys(directories):
            first = len(names) * copies
            names[directory] = tuple(f"reward-model-{number}" for number in range(first, first + copies))
        return RewardActors(names=names, num_gpus=len(names) * num_devices)

    @property
    def num_actors(self) -> int:
        """Return the number of copies of all models."""
        return sum(map(len, self.names.values()))


def is_url(name: str) -> bool:
    """Return True for the address of a served reward model."""
    return name.startswith(("http://", "https://"))


def is_model(name: str) -> bool:
    """Return True for a reward model that is loaded by its directory."""
    return name.startswith(_MODEL)


def model_directory(name: str) -> Path:
    """Return the directory of a reward model."""
    return Path(name.removeprefix(_MODEL))


def public_reward_type(text: str) -> str:
    """Return `text` for display: URLs without user, password and query."""
    return re.sub(r"(https?://)[^/?#,]*@", r"\1", re.sub(r"(https?://[^,?]*)\?[^,]*", r"\1", text))


def default_timeout_s(parts: Sequence[RewardPart]) -> float:
    """Return the default time for one response."""
    return LONG_TIMEOUT_S if any(part.name not in MATH_REWARDS for part in parts) else TIMEOUT_S


def has_host(url: str) -> bool:
    """Return True for a URL with a host."""
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:  # brackets without an IPv6 address
        return False


def is_own(name: str) -> bool:
    """Return True for a user's function."""
    return is_plugin(name) and not is_url(name) and not is_model(name)


def parse_reward_type(text: str) -> tuple[RewardPart, ...]:
    """Parse the rewards that `text` names, in order.

    Raises: ConfigError for an unknown name, a name twice, or a weight that is not a finite number.
    """
    where = f"--reward-type {redacted(text)!r}"
    parts = tuple(_part(piece.strip(), where) for piece in text.split(","))
    names = [part.name for part in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {redacted(twice)} is named twice; name it once, with the sum of the weights")
    if NO_REWARD in names and len(names) > 1:
        raise ConfigError(f"{where}: {NO_REWARD} adds nothing to other rewards; leave it out")
    if ENVIRONMENT_REWARD in names and (len(names) > 1 or parts[0].weight != 1):
        raise ConfigError(
            f"{where}: the rewards of an environment are added to those of -rt as they are; name the others alone, or "
            f"-rt {ENVIRONMENT_REWARD}"
        )
    return parts


def absolute_reward_type(text: str) -> str:
    """Return `text` with absolute paths: functions are loaded by processes with other working directories.

    Other rewards are unchanged, also invalid ones. Raises: ValueError for the home of an unknown user.
    """
    return ",".join(_absolute_piece(piece.strip()) for piece in text.split(","))


def short_names(parts: tuple[RewardPart, ...]) -> tuple[str, ...]:
    """Return a short name for each reward, for metrics; all are distinct.

    `boxed` is boxed, `rewards/brevity.py:score` is brevity.score, `model:/runs/judge` is judge,
    `https://user@rm:8000/v1?k=3` is rm:8000/v1.
    """
    names: list[str] = []
    for part in parts:
        wanted = _short_name(part.name)
        number = sum(re.fullmatch(rf"{re.escape(wanted)}(-\d+)?", name) is not None for name in names)
        names.append(f"{wanted}-{number + 1}" if number else wanted)
    return tuple(names)


def _part(piece: str, where: str) -> RewardPart:
    if is_url(piece):
        check_no_credentials(piece, where)
    name, weight_text = _split(piece)
    if not _is_known(name):
        what = f"unknown reward {redacted(name)!r}" if name else "a reward without a name"
        raise ConfigError(f"{where}: {what}; use {_CHOICES}, each with =WEIGHT if there are several, joined by commas")
    if is_url(name) and not has_host(name):
        raise ConfigError(f"{where}: {redacted(name)!r} names no host; use http://HOST:PORT/PATH")
    if weight_text is None:
        return RewardPart(name=name)
    weight = _as_number(weight_text)
    if weight is None or not math.isfinite(weight):
        raise ConfigError(f"{where}: the weight of {name} is {weight_text!r}; use a finite number")
    return RewardPart(name=name, weight=weight)


def _split(piece: str) -> tuple[str, str | None]:
    """Return the name and the text of the weight, None without one."""
    name, equals, weight_text = (text.strip() for text in piece.rpartition("="))
    if not equals:
        return piece, None
    if is_url(piece):
        parameter = re.split(r"[?&]", name)[-1]
        is_in_query = "?" in name and "=" not in parameter
        return (piece, None) if is_in_query else (name, weight_text)
    # A path may hold an equals sign: /runs/lr=3/mine.py:score.
    is_weight = _as_number(weight_text) is not None or (_is_known(name) and not is_model(name))
    return (name, weight_text) if is_weight else (piece, None)


def _absolute_piece(piece: str) -> str:
    name, weight_text = _split(piece)
    if is_own(name):
        path, _, function = name.rpartition(":")
        name = f"{absolute(path)}:{function}"
    elif is_model(name) and name != _MODEL:
        name = f"{_MODEL}{absolute(name.removeprefix(_MODEL))}"
    return name if weight_text is None else f"{name}={weight_text}"


def _short_name(name: str) -> str:
    if is_url(name):
        address = urlsplit(name)
        return f"{address.netloc.rpartition('@')[2]}{address.path.rstrip('/')}"
    if is_model(name):
        return model_directory(name).name
    if is_own(name):
        path, _, function = name.rpartition(":")
        return f"{path.rpartition('/')[2].removesuffix('.py')}.{function}"
    return name


def _is_known(name: str) -> bool:
    if is_model(name):
        return name != _MODEL
    is_function = is_plugin(name) and "@" not in name.rpartition(":")[2]  # else an address without http://
    return name in (*BUILT_IN_REWARDS, NO_REWARD, ENVIRONMENT_REWARD) or is_function or is_url(name)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
