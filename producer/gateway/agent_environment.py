"""Train an agent that is a program of its own: start it for each episode, and record what it asks the policy.

In: prompts, and a command. Out: trajectories of all that the engine sampled for the command's calls. The program speaks
OpenAI's API to a gateway on loopback, whose thread runs the episodes; the engine is asked on the event loop of the
producer's environments. An agent that fails, asks nothing or takes too long is scored `invalid`: masked, and counted.
"""

import asyncio
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.errors import EngineError, RolloutError, RunError
from coati_rl.observability.records import CONVERSATIONS
from coati_rl.protocols import OnTokens
from coati_rl.types import Completion, Prompt, Score, Trajectory
from producer.environments.environment import Generate, Rollout
from producer.environments.episode_environment import CUT, episode_task, joined_trajectories
from producer.environments.episode_scores import environment_score, invalid_episode
from producer.environments.recorder import ConversationTree
from producer.gateway.agent_process import run_agent
from producer.gateway.agent_task import agent_variables, task_object, write_task
from producer.gateway.app import BodyLimits, make_app
from producer.gateway.conversations import Language, RecordedConversation
from producer.gateway.episode_table import PREFIX, EpisodeTable, reward_router
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.served_models import ServedModels
from producer.gateway.server import ServerThread
from producer.gateway.session import Session

_MODEL = "policy"  # as the API names it
_MAX_UID = 100  # characters of it in a file's name
_MAX_IN_FLIGHT = 64  # calls of an agent that are sampled at a time
_MAX_WAITING = 4096  # further ones that wait for these


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentCommand:
    """Describe the program, and what it may take."""

    command: tuple[str, ...]
    timeout_s: float  # of an episode
    max_processes: int  # at a time, of this producer
    with_ground_truth: bool  # in the task
    truth_columns: frozenset[str]  # that may hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """Hold an episode that is over."""

    trajectories: tuple[Trajectory, ...]
    record: dict[str, Any]
    failure: str | None


class AgentEnvironment:
    """Implement `Environment` with a process for each episode; `close` ends the gateway and all agents.

    Args:
        agent: the program.
        language: of the model.
        correct_from: by task, where the rewards that agents report are all that counts (-rt env): the reward from which
            an episode is correct. Episodes of other tasks are scored by -rt, too.
        seed: of the run.
        may_renormalise: as for `EpisodeEnvironment`.
        errors: directory in the run directory's logs/ for the error output of each episode's program; None: it is not
            kept.
    """

    def __init__(
        self,
        agent: AgentCommand,
        language: Language,
        *,
        correct_from: Mapping[str, float],
        seed: int = 0,
        may_renormalise: bool = False,
        errors: Path | None = None,
    ) -> None:
        self._errors = errors
        self._agent = agent
        self._language = language
        self._correct_from = correct_from
        self._seed = seed
        self._may_renormalise = may_renormalise
        self._table = EpisodeTable()
        self._places = asyncio.Semaphore(agent.max_processes)
        self._directory = Path(tempfile.mkdtemp(prefix="coati-agents-"))
        limits = BodyLimits()
        app = make_app(
            lambda request: self._table.find(request).session,
            prefix=PREFIX,
            models=ServedModels.one(_MODEL),
            limits=limits,
        )
        app.include_router(reward_router(self._table, limits))
        self._server = ServerThread(app)

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Rollout:
        loop, cut = asyncio.get_running_loop(), asyncio.Event()  # of the gateway's event loop
        cutting = asyncio.ensure_future(self._set_when(generate.cut, cut))
        works = [self._server.submit(self._play(prompt, generate, number, loop, cut)) for number in range(group_size)]
        try:
            played = await asyncio.gather(*map(asyncio.wrap_future, works))
        except BaseException:  # the engine has ended, or nobody waits for the group
            for work in works:
                work.cancel()
            raise
        finally:
            cutting.cancel()
        return _rollout(played, lambda each: self._score(prompt.task, each))

    def close(self) -> None:
        """End the gateway, and the agents with it; blocks until they have ended."""
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _set_when(self, cut: asyncio.Event, own: asyncio.Event) -> None:
        await cut.wait()
        self._server.call_soon(own.set)

    def _score(self, task: str, played: _Played) -> Score | None:
        """Return the score of an episode; None if the scorer of -rt is to be asked."""
        if played.failure is not None:
            return invalid_episode(played.failure)
        if task not in self._correct_from:
            return None
        if not any(trajectory.rewards for trajectory in played.trajectories):
            return invalid_episode("agent: it reported no reward, and no other counts (-rt env)")
        return environment_score(played.trajectories, correct_from=self._correct_from[task])

    async def _play(
        self, prompt: Prompt, generate: Generate, number: int, loop: asyncio.AbstractEventLoop, cut: asyncio.Event
    ) -> _Played:
        """Run one episode, in the gateway's event loop. Raises: RunError if the engine has ended."""
        tree = ConversationTree(self._language.template, episode=number, prompt_ids=prompt.token_ids)
        conversation = RecordedConversation(self._language, tree)
        sample = _LeaseSample(generate, number, loop)
        is_trained = prompt.purpose == "train"
        rules = SamplingRules(
            sampling=generate.sampling,
            is_trained=is_trained,
            may_renormalise=self._may_renormalise or not is_trained,
            seed_scope=f"{generate.sampling.seed}/{number}",
        )
        session = Session(
            conversation,
            sample,
            rules,
            decode=self._language.decode,
            max_in_flight=_MAX_IN_FLIGHT,
            max_waiting=_MAX_WAITING,
        )
        begin, errors = time.perf_counter(), self._errors_of(prompt, number)
        failure = await _unless_cut(self._placed(prompt, generate, number, session, conversation, errors), cut)
        if sample.engine_error is not None:
            raise sample.engine_error
        failure = failure or session.fault
        if failure is None and conversation.last is None:
            failure = "it ended without a call that was answered"
        return _Played(
            trajectories=tree.trajectories(),
            record={
                "ended": "done" if failure is None else "failed",
                "seconds": round(time.perf_counter() - begin, 6),
                "turns": conversation.turns,
                CONVERSATIONS: tree.conversations(),
                **({"stderr": "/".join(errors.parts[-3:])} if errors is not None and errors.is_file() else {}),
            },
            failure=None if failure is None else f"agent: {failure}",
        )

    def _errors_of(self, prompt: Prompt, number: int) -> Path | None:
        """Return the file for an episode's error output; a prompt may be played again, as in each evaluation."""
        if self._errors is None:
            return None
        name = re.sub(r"[^\w.+:-]", "_", prompt.uid)[:_MAX_UID]
        return self._errors / f"{name}-{number}-{secrets.token_hex(4)}.txt"

    async def _placed(
        self,
        prompt: Prompt,
        generate: Generate,
        number: int,
        session: Session,
        conversation: RecordedConversation,
        errors: Path | None,
    ) -> str | None:
        """Wait for one of the places of agents' processes, then run the episode. Returns: as `_run`."""
        async with self._places:
            return await self._run(prompt, generate, number, session, conversation, errors)

    async def _run(
        self,
        prompt: Prompt,
        generate: Generate,
        number: int,
        session: Session,
        conversation: RecordedConversation,
        errors: Path | None,
    ) -> str | None:
        """Run the command while its episode is open. Returns: why it failed, if it did."""
        told = task_object(
            episode_task(prompt, number, run_seed=self._seed),
            with_ground_truth=self._agent.with_ground_truth,
            truth_columns=self._agent.truth_columns,
        )
        registered = self._table.register(session, conversation)
        path = self._directory / f"{registered.episode_id}.json"
        url = self._server.url + PREFIX.format(episode=registered.episode_id)
        try:
            write_task(told, path)
            return await run_agent(
                self._agent.command,
                environment=agent_variables(os.environ, url=url, token=registered.token, task=path),
                task=path,
                timeout_s=self._agent.timeout_s,
                errors=errors,
            )
        except OSError as error:  # no process, descriptor or room on the disk is left, or the command is too long
            return f"it could not be started: {error}"
        finally:
            self._table.end(registered)
            generate.end_episode(number)
            path.unlink(missing_ok=True)


async def _unless_cut(work: Coroutine[Any, Any, str | None], cut: asyncio.Event) -> str | None:
    """Return what an episode's work returns; cancel it if the episode is cut. Returns: why it failed, then."""
    if cut.is_set():
        work.close()
        return CUT
    running, cutting = asyncio.ensure_future(work), asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({running, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
    finally:
        cutting.cancel()
        running.cancel()
        await asyncio.wait({running})
    return CUT


class _LeaseSample:
    """Implement `Sample` for an episode of a lease: ask on the event loop of the producer's environments."""

    def __init__(self, generate: Generate, episode: int, loop: asyncio.AbstractEventLoop) -> None:
        self._generate = generate
        self._episode = episode
        self._loop = loop
        self.engine_error: RunError | None = None  # why the engine has ended

    async def __call__(
        self, token_ids: Sequence[int], *, num_samples: int, sampling: Mapping[str, Any], on_tokens: OnTokens | None
    ) -> tuple[Completion, ...]:
        asking = self._generate(
            token_ids, num_samples=num_samples, episode=self._episode, sampling=sampling, on_tokens=on_tokens
        )
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:  # the loop is closed
            asking.close()
            raise EngineError("the producer has ended") from error
        try:
            return await asyncio.wrap_future(asked)
        except RunError as error:
            self.engine_error = error
            raise


def _rollout(played: Sequence[_Played], score: Callable[[_Played], Score | None]) -> Rollout:
    """Return the group of some episodes. Raises: RolloutError if all have failed."""
    failures = [each.failure for each in played if each.failure is not None]
    if len(failures) == len(played):
        raise RolloutError(f"all {len(played)} episodes failed, the first one because: {failures[0]}")
    scores = {number: score(each) for number, each in enumerate(played)}
    return Rollout(
        trajectories=joined_trajectories([each.trajectories for each in played]),
        scores={number: each for number, each in scores.items() if each is not None},
        records={number: each.record for number, each in enumerate(played)},
    )
