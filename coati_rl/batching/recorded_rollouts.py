"""Read the rollouts that a run has recorded (docs/rollouts.md) into trajectories with a reward of each token.

Rewards are at the tokens that a run with a critic puts them at. The lines of an episode's trajectories stand one after
the other: what is of no turn is the episode's reward less what its environment gave in all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import PackedReward, PackedTurn
from coati_rl.batching.turn_rewards import trajectory_rewards
from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Recorded
from coati_rl.reading.row_formats import Columns, FormSet
from coati_rl.run_lengths import decode_runs
from coati_rl.types import MAX_REWARD

_EPISODE = ("step", "uid", "episode")  # what the lines of an episode have in common
_OF_A_LINE = (*_EPISODE, "sample", "response", "reward", "verdict")
_OF_TOKENS = ("prompt_token_ids", "token_ids", "turns")

_Line = tuple[str, Mapping[str, Any]]  # flag, file and line, and the line itself
_Prompts = dict[bytes, np.ndarray]


def read_rollouts(rows: Iterable[tuple[str, Any]], job: str, columns: Columns | None = None) -> FormSet:
    """Return a Recorded of each line; those of episodes whose reward is undecided are left out and counted.

    Args:
        rows: each with flag, file and line, for messages.
        job: for messages.
        columns: none may be named, as the run has named them.
    Raises: ConfigError for what is no line of rollouts, for one without token ids, or for a part of an episode.
    """
    if columns is not None and (columns.named or columns.input_template is not None):
        raise ConfigError(
            f"--prompt-key and --input-template have no effect on coati-rl {job}, which reads token ids; leave them out"
        )
    forms, num_undecided, prompts = list[Recorded](), 0, _Prompts()
    lines = (_checked(where, row) for where, row in rows)
    for _, group in groupby(lines, key=lambda line: [line[1][key] for key in _EPISODE]):
        episode = [*group]
        _check_complete(episode)
        if _is_decided(episode[0][1]):
            forms += _read_episode(episode, prompts)
        else:
            num_undecided += len(episode)
    return FormSet(forms=tuple(forms), num_undecided=num_undecided)


def _checked(where: str, row: Any) -> _Line:
    """Return a line that has all that is read of it."""
    held = row if isinstance(row, Mapping) else {}
    lacks = [key for key in _OF_A_LINE if key not in held]
    if lacks or not isinstance(held["sample"], int):
        raise ConfigError(
            f"{where}: has no {', '.join(lacks) or 'number as sample'}, and is no line of rollouts; give RUN/rollouts, "
            "where RUN is a run's directory, or files of it"
        )
    if lacks := [key for key in _OF_TOKENS if key not in held]:
        raise ConfigError(
            f"{where}: has no {', '.join(lacks)}, and values are of the tokens that were sampled; record the rollouts "
            "with --rollout-detail full"
        )
    return where, held


def _check_complete(episode: Sequence[_Line]) -> None:
    """Raise ConfigError where lines of an episode's other trajectories are missing."""
    where, first = episode[0]
    last = episode[-1][1]
    numbers = [line["sample"] for _, line in episode]
    is_begun = "parent_sample" not in first and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    if not is_begun or ({"messages", "text"} & {*last} and "environment" not in last):
        raise ConfigError(
            f"{where}: trajectories of episode {first['episode']} of {first['uid']} are missing, and the episode's "
            "reward is of all of them; give whole episodes (another --max-samples, or whole files)"
        )


def _is_decided(line: Mapping[str, Any]) -> bool:
    reward = line["reward"]  # null: not finite
    return line["verdict"] != "invalid" and isinstance(reward, int | float) and abs(reward) <= MAX_REWARD


def _read_episode(episode: Sequence[_Line], prompts: _Prompts) -> list[Recorded]:
    given = []
    for where, line in episode:
        try:
            given.append([PackedReward(int(place), name, float(value)) for place, name, value in _given(line)])
        except (TypeError, ValueError) as error:
            raise _unreadable(where, error) from error
    rest = float(episode[0][1]["reward"])
    for reward in chain.from_iterable(given):
        rest -= reward.value  # one by one, as a run does: the same bits
    return [_read(*line, rewards, rest, prompts) for line, rewards in zip(episode, given, strict=True)]


def _given(line: Mapping[str, Any]) -> Sequence[Any]:
    """Return what the environment gave: [place in token_ids, name, value] each."""
    found: Sequence[Any] = line.get("token_rewards", ())
    return found


def _read(
    where: str, line: Mapping[str, Any], given: Sequence[PackedReward], rest: float, prompts: _Prompts
) -> Recorded:
    try:
        prompt_ids, token_ids = _ids(line, "prompt_token_ids"), _ids(line, "token_ids")
        mask = decode_runs(line.get("loss_mask", ((True, len(token_ids)),)), bool)
        turns = [PackedTurn(number, *turn) for number, turn in enumerate(line["turns"])]
        if len(mask) != len(token_ids) or not all(0 <= turn.start <= turn.end <= len(mask) for turn in turns):
            raise ValueError(f"{len(token_ids)} token_ids, a loss_mask of {len(mask)}, turns {line['turns']}")
        return Recorded(
            prompt_ids=prompts.setdefault(prompt_ids.tobytes(), prompt_ids),
            token_ids=token_ids,
            loss_mask=mask,
            rewards=trajectory_rewards(turns, given, mask, rest=rest),
            last_turn=slice(turns[-1].start, turns[-1].end),
            response=str(line["response"]),
            where=where,
        )
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise _unreadable(where, error) from error


def _ids(line: Mapping[str, Any], name: str) -> np.ndarray:
    """Return int32[T]; NumPy itself would cut fractions off."""
    ids = np.array(line[name])
    if len(ids) and (ids.dtype.kind != "i" or ids.ndim != 1 or ids.min() < 0):
        raise ValueError(f"{name} are no list of token ids")
    return ids.astype(np.int32)


def _unreadable(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where}: is no line of rollouts as a run writes it ({error}); give the files of a run")
