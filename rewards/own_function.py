"""A reward function of the user's, FILE.py:FUNCTION: its parameters tell how it is called; what it returns or raises
becomes scores.

- `f(messages, answer)`, RL2's: the conversation with the response as its last message, and the ground truth.
- `f(queries, prompts, labels)`, OpenRLHF's: a whole group at once. Each query is the rendered prompt and a response.
- `f(response, ground_truth)`: two texts.

The ground truth is `answer`, `labels` or `ground_truth`: a function may leave that parameter out, or give it a default,
which it then has for rows without a ground truth. Parameters beyond these need defaults. Each may be a coroutine
function; those of one response then run at once for all responses of a call, in one event loop that lasts as long as
the process. What a function raises is an invalid score with the exception and the line of the user's code, and the run
goes on. It is called in one thread.

The file is imported where the run starts, in the producers and in what scores: what is large, or on a GPU, is best
loaded at the first call.
"""

import asyncio
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.returned_value import as_score, as_scores
from rewards.reward import invalid_score

logger = logging.getLogger(__name__)

_OF_MESSAGES = ("messages", "answer")  # the last name of each is the ground truth
_OF_A_GROUP = ("queries", "prompts", "labels")
_OF_TEXTS = ("response", "ground_truth")
_FORMS = (_OF_MESSAGES, _OF_A_GROUP, _OF_TEXTS)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)  # of the user's code: data, and no reason to stop
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class OwnFunctionReward:
    """A `Reward`.

    Args:
        name: FILE.py:FUNCTION, with an absolute path.
    Raises: ConfigError if there is no such function, or its parameters are of no known form.
    """

    def __init__(self, name: str) -> None:
        self._function = load_function(name, flag="--reward-type")
        self._file = str(Path(name.rpartition(":")[0]))
        self._form, truth = _form_of(self._function, name)
        self._takes_truth = truth is not None
        self.needs_truth = truth is not None and truth.default is truth.empty
        self.is_batch = self._form == _OF_A_GROUP
        self._is_async = _is_coroutine_function(self._function)
        self.is_concurrent = self._is_async and not self.is_batch  # responses of a call run at the same time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: set[tuple[str, str]] = set()  # kinds of failure whose traceback is in the log

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """As `Reward.score`."""
        if self.is_batch:
            yield from self._score_group(responses, problem)
        elif self._is_async:
            yield from self._score_at_once(responses, problem)
        else:
            for response in responses:
                yield self._score_one(response, problem)

    def _score_one(self, response: str, problem: Problem) -> Score:
        try:
            return as_score(self._awaited(self._function(**self._arguments(response, problem))))
        except _FAILURES as error:
            return self._failed(error, problem)

    def _score_group(self, responses: Sequence[str], problem: Problem) -> list[Score]:
        num_responses = len(responses)
        try:
            value = self._function(
                queries=[problem.prompt + response for response in responses],
                prompts=[problem.prompt] * num_responses,
                **self._truth([problem.ground_truth] * num_responses, problem),
            )
            return as_scores(self._awaited(value), num_responses)
        except _FAILURES as error:
            return [self._failed(error, problem)] * num_responses

    def _score_at_once(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """The scores in order, each as soon as it and those before it are known."""
        loop = self._event_loop()
        tasks = [loop.create_task(self._score_async(response, problem)) for response in responses]
        try:
            for task in tasks:
                yield loop.run_until_complete(task)
        finally:
            for task in tasks:
                task.cancel()

    async def _score_async(self, response: str, problem: Problem) -> Score:
        # The exception is caught within the task: SystemExit would leave the event loop in the middle of the others.
        try:
            return as_score(await self._function(**self._arguments(response, problem)))
        except _FAILURES as error:
            return self._failed(error, problem)

    def _arguments(self, response: str, problem: Problem) -> dict[str, Any]:
        truth = self._truth(problem.ground_truth, problem)
        if self._form == _OF_TEXTS:
            return {"response": response, **truth}
        conversation = [dict(message) for message in problem.messages]  # theirs to change
        return {"messages": [*conversation, {"role": "assistant", "content": response}], **truth}

    def _truth(self, value: Any, problem: Problem) -> dict[str, Any]:
        """The argument with the ground truth; none if the function lacks it, or has a default and the row nothing."""
        is_given = self.needs_truth or (self._takes_truth and problem.ground_truth)
        return {self._form[-1]: value} if is_given else {}

    def _awaited(self, value: Any) -> Any:
        """Return what was returned, or what it comes to, where a plain function returned a coroutine."""
        return self._event_loop().run_until_complete(_result(value)) if inspect.isawaitable(value) else value

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """One for all calls: clients that a function keeps open belong to their loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop

    def _failed(self, error: BaseException, problem: Problem) -> Score:
        kind, place = type(error).__name__, self._place(error)
        if (kind, place) not in self._told:
            self._told.add((kind, place))
            logger.warning("the reward of a response to prompt %r failed", problem.uid, exc_info=error)
        text = shorten(error, 200)
        return invalid_score(f"{kind}{f': {text}' if text else ''}{f' ({place})' if place else ''}")

    def _place(self, error: BaseException) -> str:
        """Return where it was raised: the last line of the user's file, of any file if there is none of that."""
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        lines = [(file, line) for file, line in lines if file != __file__]
        lines = [(file, line) for file, line in lines if file == self._file] or lines
        return f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def _form_of(function: Callable[..., Any], name: str) -> tuple[tuple[str, ...], inspect.Parameter | None]:
    """Find the names that the function is called with, and its parameter for the ground truth; None: it has none.

    Raises: ConfigError with the forms there are.
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # written in C, without a signature
        parameters = inspect.signature(function).parameters
    for form in _FORMS:
        truth = parameters.get(form[-1])
        is_given = all(key in parameters and parameters[key].kind in _BY_NAME for key in form[:-1])
        others = [parameter for key, parameter in parameters.items() if key not in form]
        if truth is None:  # nor may it be among the others: what it is called there is not known here
            is_given = is_given and not any(p.kind in _REST for p in others)
        else:
            is_given = is_given and truth.kind in _BY_NAME
        if is_given and all(p.default is not p.empty or p.kind in _REST for p in others):
            return form, truth
    takes = f"takes ({', '.join(map(str, parameters.values()))})" if parameters else "names no parameters"
    *forms, last = (f"({', '.join(form)})" for form in _FORMS)
    raise ConfigError(
        f"--reward-type {name}: {takes}; a reward function takes {', '.join(forms)} or {last}, "
        "with or without the last of them, and what it has beyond these needs defaults"
    )


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object of a class with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _result(awaitable: Any) -> Any:
    return await awaitable
