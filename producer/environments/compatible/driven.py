"""Play agents that ask the engine themselves: what they ask is an observation, the answer is the next action.

The agent runs in a thread of its own, and waits in it for each answer. The policy is given the tokens that were
recorded and what the agent has put behind them; an agent that has changed what was said before is refused.
"""

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Action, EpisodeFailure, EpisodeTask, Observation, Step
from producer.environments.episode_host import failure_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Hold what the policy is asked: text, or token ids."""

    context: str | list[int]
    sampling: dict[str, Any] | None
    answer: "Future[Action]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Hold what an agent returned: rewards by name or one, and what is written with the rollout."""

    reward: Any
    info: dict[str, Any]
    filter_score: float | None = None  # as of a Step
    metrics: Mapping[str, float] = field(default_factory=dict)


class Asking:
    """Ask the policy, from the agent's thread."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Ask | Ended | EpisodeFailure] = queue.SimpleQueue()
        self._last: Future[Action] | None = None
        self._is_closed = False

    def ask(self, context: str | list[int], sampling: dict[str, Any] | None) -> "Future[Action]":
        """Ask for an answer. Returns: its future, which is cancelled when the episode is over."""
        answer: Future[Action] = Future()
        self._last = answer
        self.events.put(Ask(context=context, sampling=sampling, answer=answer))
        if self._is_closed:
            answer.cancel()
        return answer

    def close(self) -> None:
        """Cancel what is asked for, now and later."""
        self._is_closed = True
        if self._last is not None:
            self._last.cancel()


class Agent(Protocol):
    """Run a user's agent."""

    def run(self, task: EpisodeTask, asking: Asking) -> Ended:
        """Run it to its end. Raises: what it raises."""

    def check(self, token_ids: list[int], turns: list[tuple[int, int]], returned: Ended) -> None:
        """Compare what it says of the tokens, if it does. Raises: EpisodeFailure."""

    def truncated(self) -> Any:
        """Return the reward of an episode that a limit ends. Raises: EpisodeFailure if there is none."""


class DrivenEpisode:
    """Implement `Episode` with an agent."""

    def __init__(self, agent: Agent, limits: RunLimits) -> None:
        self._agent = agent
        self._limits = limits
        self._asking = Asking()
        self._text = ""  # of the context that was asked for last, if it is text
        self._ids: list[int] = []  # of the recorded context, if the agent asks with token ids
        self._turns: list[tuple[int, int]] = []  # the answers in these
        self._answer: Future[Action] | None = None

    def reset(self, task: EpisodeTask) -> Step:
        """Start the agent. Returns: what it asks first, and how the answer is sampled."""
        threading.Thread(target=self._run, args=(task,), name="agent", daemon=True).start()
        event = self._next()
        if not isinstance(event, Ask):
            raise EpisodeFailure("the agent returned without having asked the policy")
        self._answer = event.answer
        observation: Observation = event.context
        if isinstance(event.context, str):
            self._text = event.context
            observation = None if self._text == task.prompt else self._text
        else:
            self._ids = list(event.context)
        return Step(observation=observation, sampling=event.sampling)

    def step(self, action: Action) -> Step:
        """Give the agent its answer. Returns: what it asks next, or its reward."""
        self._turns.append((len(self._ids), len(self._ids) + len(action.token_ids)))
        self._ids += action.token_ids
        if self._answer is None or not self._answer.set_running_or_notify_cancel():
            raise EpisodeFailure("the agent no longer waits for its answer")
        self._answer.set_result(action)
        event = self._next()
        if isinstance(event, Ended):
            self._agent.check(self._ids, self._turns, event)
            return Step(
                reward=event.reward,
                info=event.info,
                done=True,
                filter_score=event.filter_score,
                metrics=event.metrics,
            )
        self._answer = event.answer
        return Step(observation=self._new(event.context, action), reward={}, sampling=event.sampling)

    def truncated(self) -> Any:
        """Return the reward of an episode that a limit ends."""
        return self._agent.truncated()

    def close(self) -> None:
        """End the agent: what it asks for is cancelled."""
        self._asking.close()

    def _run(self, task: EpisodeTask) -> None:
        try:
            self._asking.events.put(self._agent.run(task, self._asking))
        except BaseException as error:  # noqa: BLE001 - a user's code may raise SystemExit
            self._asking.events.put(failure_of("the agent", error))

    def _next(self) -> Ask | Ended:
        event = self._asking.events.get()  # the caller has a time limit
        if isinstance(event, EpisodeFailure):
            raise event
        return event

    def _new(self, context: str | list[int], action: Action) -> Observation:
        """Return what an agent put behind the context before and the answer. Raises: EpisodeFailure."""
        if not isinstance(context, str):
            if context[: len(self._ids)] != self._ids or not self._ids:
                raise EpisodeFailure(
                    "the agent asks with other tokens than were sampled: its context does not begin with the one "
                    "before and the answer's token_ids; it must not encode them again"
                )
            new = context[len(self._ids) :]
            self._ids = list(context)
            return new
        for answer in (action.text, action.text.strip()):  # some strip it; the recorded answer is kept
            before = self._text + answer
            if context.startswith(before):
                self._text = context
                return self._without_end_of_turn(context.removeprefix(before), action)
        raise EpisodeFailure(
            "the agent, or the chat template for it, changes what was said before: its text does not begin with the "
            "one before and the answer; such conversations need an episode that returns messages (docs/agents.md)"
        )

    def _without_end_of_turn(self, text: str, action: Action) -> str:
        """Leave out the token that ends the turn if the policy has sampled it."""
        last = self._limits.tokenizer().decode(list(action.token_ids[-1:]), skip_special_tokens=False)
        was_sampled = action.finish_reason == "stop" and last and not action.text.endswith(last)
        return text.removeprefix(last) if was_sampled else text
