"""Run a user's episodes: G for a prompt, all at the same time, each a conversation of several turns with the engine.

An episode ends when its environment says so, after `max_turns` answers, or when no token is left of the context; then
it is an ordinary sample. One that raises, takes too long or returns what cannot be used is scored `invalid`: it is
masked and counted, and the others of its group go on. A prompt fails if all of its episodes do.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coati_rl.errors import RolloutError, RunError
from coati_rl.observability.records import CONVERSATIONS
from coati_rl.text import shorten
from coati_rl.types import Prompt, Score, Trajectory
from producer.environments.chat import ChatTemplate
from producer.environments.environment import Generate, Rollout
from producer.environments.episode import Episode, EpisodeFailure, EpisodeLimits, EpisodeTask
from producer.environments.episode_host import EpisodeCalls, EpisodeHost, ThreadHost
from producer.environments.episode_player import EpisodePlayer
from producer.environments.episode_scores import environment_score, invalid_episode
from producer.environments.recorder import ConversationTree
from producer.environments.step_sampling import STEP_FIELDS

CUT = "it was cut, as trainers waited for it (--stale-episodes cut)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """Hold an episode that is over."""

    trajectories: tuple[Trajectory, ...]
    record: dict[str, Any]
    failure: str | None = None


class EpisodeEnvironment:
    """Implement `Environment` with an object for each episode.

    Args:
        make_episode: makes the user's object, which is then run in threads.
        template: of the model.
        limits: of each episode.
        correct_from: by task, where the environment's rewards are all that counts (-rt env): the reward from which an
            episode is correct. Episodes of other tasks are scored by -rt, too.
        seed: of the run, from which episodes get theirs.
        may_renormalise: training turns may be sampled with a top_p, top_k or min_p of their own, since the run does not
            train on the engine's log-probabilities.
        host: runs the user's objects elsewhere, and makes them.
    """

    def __init__(
        self,
        make_episode: Callable[[], Episode],
        template: ChatTemplate,
        limits: EpisodeLimits,
        *,
        correct_from: Mapping[str, float],
        seed: int = 0,
        may_renormalise: bool = False,
        host: EpisodeHost | None = None,
    ) -> None:
        self._host = host or ThreadHost(make_episode, timeout_s=limits.timeout_s)
        self._template = template
        self._limits = limits
        self._correct_from = correct_from
        self._seed = seed
        self._may_renormalise = may_renormalise

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Rollout:
        """See `Environment.run`. Raises: RolloutError if all episodes fail."""
        tasks = [asyncio.ensure_future(self._play(prompt, generate, number)) for number in range(group_size)]
        cutting = asyncio.ensure_future(_cancel_when(generate.cut, tasks))
        try:
            played = await asyncio.gather(*tasks)
        except BaseException:  # the engine has ended, or nobody waits for the group
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            cutting.cancel()
        failures = [each.failure for each in played if each.failure is not None]
        if len(failures) == group_size:
            raise RolloutError(f"all {group_size} episodes failed, the first one because: {failures[0]}")
        scores = {number: self._score(prompt.task, each) for number, each in enumerate(played)}
        return Rollout(
            trajectories=joined_trajectories([each.trajectories for each in played]),
            scores={number: score for number, score in scores.items() if score is not None},
            records={number: each.record for number, each in enumerate(played)},
        )

    def close(self) -> None:
        """End what runs for episodes."""
        self._host.close()

    def _score(self, task: str, played: _Played) -> Score | None:
        """Return the score of an episode; None if the scorer of -rt is to be asked."""
        if played.failure is not None:
            return invalid_episode(played.failure)
        if task in self._correct_from:
            return environment_score(
                played.trajectories,
                correct_from=self._correct_from[task],
                filter_score=played.record.get("filter_score"),
            )
        return None

    async def _play(self, prompt: Prompt, generate: Generate, number: int) -> _Played:
        tree = ConversationTree(self._template, episode=number, prompt_ids=prompt.token_ids)
        task = replace(
            episode_task(prompt, number, run_seed=self._seed),
            sampling={name: getattr(generate.sampling, name) for name in STEP_FIELDS if name != "seed"},
        )
        try:
            calls = self._host.open()
        except EpisodeFailure as error:
            return _failed(tree, str(error), [])
        is_trained = prompt.purpose == "train" and not self._may_renormalise
        player = EpisodePlayer(
            tree, self._template, self._limits, generate=generate, calls=calls, may_renormalise=not is_trained
        )
        try:
            try:
                ending = await player.play(task, prompt.token_ids)
            finally:
                generate.end_episode(number)
        except (RunError, asyncio.CancelledError) as error:
            calls.abandon()
            if isinstance(error, asyncio.CancelledError) and generate.cut.is_set():
                return _failed(tree, CUT, player.turns)
            raise
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise what it likes about a text
            await _close(calls, generate.cut)
            is_named = isinstance(error, EpisodeFailure | RolloutError)
            cause = str(error) if is_named else f"{type(error).__name__}: {shorten(error, 200)}"
            return _failed(tree, cause, player.turns)
        await _close(calls, generate.cut)
        trajectories = tree.trajectories() if ending == "done" else _truncated(tree.trajectories())
        of_episode: dict[str, Any] = {"filter_score": player.filter_score, "metrics": player.metrics}
        given = {name: value for name, value in of_episode.items() if value not in (None, {})}
        return _Played(trajectories=trajectories, record=_record(ending, player.turns, tree) | given)


def episode_task(prompt: Prompt, episode: int, *, run_seed: int) -> EpisodeTask:
    """Return what an episode of a prompt is about."""
    return EpisodeTask(
        uid=prompt.uid,
        messages=prompt.messages,
        prompt=prompt.rendered or prompt.text,
        ground_truth=prompt.ground_truth,
        columns=prompt.columns,
        seed=_seed_of(run_seed, prompt.uid),
        episode=episode,
        purpose=prompt.purpose,
    )


async def _cancel_when(cut: asyncio.Event, tasks: Sequence["asyncio.Future[_Played]"]) -> None:
    await cut.wait()
    for task in tasks:
        task.cancel()


async def _close(calls: EpisodeCalls, cut: asyncio.Event) -> None:
    """Close an episode that is over, also while the others of its group are cut."""
    try:
        await calls.close()
    except asyncio.CancelledError:
        if not cut.is_set():
            raise


def _failed(tree: ConversationTree, cause: str, turns: Sequence[dict[str, Any]]) -> _Played:
    return _Played(
        trajectories=tree.trajectories(), record=_record("failed", turns, tree), failure=f"environment: {cause}"
    )


def _record(ended: str, turns: Sequence[dict[str, Any]], tree: ConversationTree) -> dict[str, Any]:
    return {"ended": ended, "turns": turns, CONVERSATIONS: tree.conversations()}


def joined_trajectories(parts: Sequence[tuple[Trajectory, ...]]) -> list[Trajectory]:
    """Join the trajectories of all episodes; a parent's number in its episode becomes that in the group."""
    joined: list[Trajectory] = []
    for part in parts:
        first = len(joined)
        for each in part:
            parent = each.prefix.parent
            is_fork = parent is not None
            joined.append(replace(each, prefix=replace(each.prefix, parent=first + (parent or 0))) if is_fork else each)
    return joined


def _truncated(trajectories: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
    """Mark the last turn of an episode as ended by a limit."""
    *others, last = trajectories
    return (*others, replace(last, turns=(*last.turns[:-1], replace(last.turns[-1], finish_reason="length"))))


def _seed_of(seed: int, uid: str) -> int:
    """Return 31 bits, which all generators take as a seed."""
    digest = hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
