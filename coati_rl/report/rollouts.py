"""Choose the rollouts of a step that the page shows, and describe them and the step's groups within a limit of bytes.

What is chosen first: rollouts that people have noted something of, then the best and the worst of the groups with the
largest difference of rewards, one that is invalid, one that was cut off, and then the longest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from coati_rl.report.curves import rounded
from coati_rl.report.tokens import token_fields
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import LinePlace, RunDirectory
from coati_rl.run_reader.token_ratios import read_ratios
from coati_rl.text import printable, shorten

ROLLOUTS_OF_A_STEP = 8
_BYTES_OF_A_TOKEN, _BYTES_OF_A_RATIO = 24, 9  # on the page: its text, log-probability, mask and version; its ratio
_MIN_TOKENS, _MIN_CHARACTERS = 48, 160
_SHOWN = {"prompt": 120, "truth": 60, "detail": 300, "cause": 80}  # characters
_MAX_REWARDS = 64  # of a group
_MAX_MESSAGES = 60  # of a conversation
INVALID = "invalid"  # the verdict of what could not be scored
Key = tuple[int, str, int]  # step, uid, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    """Hold of a rollout what groups and the choice are made by; a step may have many, and texts are large."""

    place: LinePlace
    key: Key
    episode: int
    task: str
    prompt: str
    truth: str
    reward: float | None
    verdict: str
    cause: str  # why it could not be scored
    is_trained: bool
    is_truncated: bool
    num_tokens: int

    @classmethod
    def of(cls, place: LinePlace, rollout: RecordedRollout) -> "Brief":
        """Take it from a rollout."""
        return cls(
            place=place,
            key=(rollout.step, rollout.uid, rollout.sample),
            episode=rollout.episode,
            task=str(rollout.line.get("task", "")),
            prompt=cut(rollout.prompt, _SHOWN["prompt"]),
            truth=cut(rollout.truth, _SHOWN["truth"]),
            reward=rollout.reward,
            verdict=rollout.verdict,
            cause=cut(shorten(rollout.detail), _SHOWN["cause"]) if rollout.verdict == INVALID else "",
            is_trained=rollout.is_trained,
            is_truncated=rollout.finish_reason == "length",
            num_tokens=rollout.num_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportStep:
    """Hold what the page shows of a step."""

    groups: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    causes: Counter[str]  # of rollouts that could not be scored
    num_rollouts: int


def cut(text: str, limit: int) -> str:
    """Return a text with escapes for what is not seen; the middle of a long one is left out, which is said."""
    if len(text) <= limit:
        return printable(text)
    head, tail = limit * 2 // 3, limit - limit * 2 // 3
    return f"{printable(text[:head])} [... {len(text) - limit:,} characters left out ...] {printable(text[-tail:])}"


def read_step(
    run: RunDirectory, step: int, *, max_bytes: int, tokenizer: Tokenizer | None, noted: Set[Key] = frozenset()
) -> ReportStep:
    """Read the groups of a step, and up to eight of its rollouts.

    Args:
        max_bytes: on the page, about, of the rollouts together.
        noted: rollouts that people have noted something of.
    """
    briefs = [Brief.of(place, rollout) for place, rollout in run.rollouts_without_tokens(step)]
    chosen = choose(briefs, noted)
    share, ratios = max_bytes // max(1, len(chosen)), read_ratios(run.path, step)
    return ReportStep(
        groups=[group_row(group) for group in grouped(briefs)],
        rollouts=[
            describe(run.rollout_at(each.place), tokenizer, share, ratios.get(each.key[1:], ())) for each in chosen
        ],
        causes=Counter(each.cause for each in briefs if each.verdict == INVALID),
        num_rollouts=len(briefs),
    )


def grouped(briefs: Iterable[Brief]) -> list[list[Brief]]:
    """Return the rollouts of each prompt, in the order of the lines."""
    groups: dict[str, list[Brief]] = {}
    for each in briefs:
        groups.setdefault(each.key[1], []).append(each)
    return list(groups.values())


def choose(briefs: Sequence[Brief], noted: Set[Key] = frozenset()) -> list[Brief]:
    """Return up to eight rollouts of a step, grouped by prompt, the best answers of a prompt first."""
    groups = sorted(grouped(briefs), key=_spread, reverse=True)
    ends = chain.from_iterable((max(group, key=_value), max(group, key=_badness)) for group in groups[:3])
    wanted = chain(
        (each for each in briefs if each.key in noted),
        ends,
        [each for each in briefs if each.verdict == INVALID][:1],
        [each for each in briefs if each.is_truncated][:1],
        sorted(briefs, key=lambda each: -each.num_tokens),
    )
    chosen: dict[Key, Brief] = {}
    for each in wanted:
        if len(chosen) < ROLLOUTS_OF_A_STEP:
            chosen.setdefault(each.key, each)
    return sorted(chosen.values(), key=lambda each: (each.key[1], _badness(each)[0], each.key[2]))


def _value(each: Brief) -> tuple[float, int]:
    """Return a key by which the best comes last; of an episode with several trajectories the one that ends it."""
    return (float("-inf") if each.reward is None else each.reward, each.key[2])


def _badness(each: Brief) -> tuple[float, int]:
    return (float("inf") if each.reward is None else -each.reward, each.key[2])


def _spread(group: Sequence[Brief]) -> float:
    rewards = [each.reward for each in group if each.reward is not None]
    return max(rewards) - min(rewards) if rewards else -1.0


def group_row(group: Sequence[Brief]) -> dict[str, Any]:
    """Return the row of a prompt's rollouts in the table of groups."""
    step, uid, _ = group[0].key
    episodes = list({each.episode: each for each in group}.values())  # one that has forked has several trajectories
    return {
        "step": step,
        "uid": printable(uid),
        **({"task": printable(group[0].task)} if group[0].task else {}),
        "prompt": group[0].prompt,
        "truth": group[0].truth,
        "rewards": [None if each.reward is None else rounded(each.reward) for each in episodes[:_MAX_REWARDS]],
        "size": len(episodes),
        "trained": len({each.episode for each in group if each.is_trained}),
        "invalid": sum(each.verdict == INVALID for each in episodes),
        "truncated": sum(each.is_truncated for each in episodes),
        "tokens": rounded(sum(each.num_tokens for each in group) / len(episodes)),
    }


def describe(
    rollout: RecordedRollout, tokenizer: Tokenizer | None, max_bytes: int, ratios: Sequence[float | None] = ()
) -> dict[str, Any]:
    """Return a rollout as the page shows it, in about so many bytes: half for what was said, half for tokens."""
    said = _ends_of(rollout.conversation())
    limit = max(_MIN_CHARACTERS, max_bytes // 2 // (len(said) + 1))
    line = rollout.line
    token_bytes = _BYTES_OF_A_TOKEN + (_BYTES_OF_A_RATIO if len(ratios) else 0)
    noted = {name: line[name] for name in ("parent_sample", "num_shared_tokens") if name in line}
    environment = line.get("environment") or {}
    return {
        "step": rollout.step,
        "uid": printable(rollout.uid),
        "sample": rollout.sample,
        "episode": rollout.episode,
        "producer": line.get("producer"),
        "prompt": cut(rollout.prompt, limit),
        "truth": cut(rollout.truth, _SHOWN["detail"]),
        "reward": None if rollout.reward is None else rounded(rollout.reward),
        "verdict": printable(rollout.verdict),
        "detail": cut(rollout.detail, _SHOWN["detail"]),
        "advantage": None if rollout.advantage is None else rounded(rollout.advantage),
        "is_trained": rollout.is_trained,
        "num_tokens": rollout.num_tokens,
        "finish_reason": rollout.finish_reason,
        "versions": [*rollout.policy_versions],
        "messages": [[cut(role, 40), cut(text, limit)] for role, text in said],
        **noted,
        "ended": cut(str(environment.get("ended", "")), 40),
        "num_forks": _num_forks(environment),
        "tokens": token_fields(rollout, tokenizer, max(_MIN_TOKENS, max_bytes // 2 // token_bytes), ratios),
    }


def _ends_of(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a conversation; of a long one its beginning and its end, which is said between them."""
    if len(messages) <= _MAX_MESSAGES:
        return messages
    half = _MAX_MESSAGES // 2
    return [*messages[:half], ("", f"{len(messages) - 2 * half} messages left out"), *messages[-half:]]


def _num_forks(environment: Mapping[str, Any]) -> int:
    """Return how often the conversation was rendered anew, of what an environment noted of an episode."""
    return sum(bool(turn.get("is_fork")) for turn in environment.get("turns") or ())
