"""Call a user's reward function, FILE.py:FUNCTION, and convert what it returns or raises to scores.

The names of its parameters decide how it is called:

- `f(messages, answer)`, as in RL2: the conversation with the response as its last message, and the ground truth.
- `f(queries, prompts, labels)`, as in OpenRLHF: a whole group. Each query is the rendered prompt with a response.
- `f(response, ground_truth)`: two texts.

The ground truth is `answer`, `labels` or `ground_truth`: a function may omit that parameter, or give it a default for
rows without a ground truth. All other parameters need defaults. A function may be a coroutine function; if it takes one
response, it then runs concurrently for all responses of a call, in one event loop for the life of the process. An
exception becomes an invalid score with the exception and the line of the user's code, and the run continues. The
function is called in one thread.

The file is imported in the driver, in the producers and in the processes that score: load large objects, and those on a
GPU, at the first call.
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

_OF_MESSAGES = ("messages", "answer")  # the last name of each form is the ground truth's
_OF_A_GROUP = ("queries", "prompts", "labels")
_OF_TEXTS = ("response", "ground_truth")
_FORMS = (_OF_MESSAGES, _OF_A_GROUP, _OF_TEXTS)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)  # raised by the user's code: recorded as invalid scores
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class OwnFunctionReward:
    """Implement `Reward` with a user's function.

    Args:
        name: FILE.py:FUNCTION, with an absolute path.
        correct_from: reward that makes an answer correct if the function does not say whether it is.
    Raises: ConfigError if there is no such function, or its parameters have none of the three forms.
    """

    def __init__(self, name: str, *, correct_from: float = 1.0) -> None:
        self._correct_from = correct_from
        self._function = load_function(name, flag="--reward-type")
        self._file = str(Path(name.rpartition(":")[0]))
        self._form, truth = _form_of(self._function, name)
        self._takes_truth = truth is not None
        self.needs_truth = truth is not None and truth.default is truth.empty
        self.is_batch = self._form == _OF_A_GROUP
        self._is_async = _is_coroutine_function(self._function)
        self.is_concurrent = self._is_async and not self.is_batch  # responses of a call run at the same time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged: set[tuple[str, str]] = set()  # exception types and lines whose traceback has been logged

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """See `Reward.score`."""
        if self.is_batch:
            yield from self._score_group(responses, problem)
        elif self._is_async:
            yield from self._score_at_once(responses, problem)
        else:
            for response in responses:
                yield self._score_one(response, problem)

    def _score_one(self, response: str, problem: Problem) -> Score:
        try:
            value = self._awaited(self._function(**self._arguments(response, problem)))
            return as_score(value, correct_from=self._correct_from)
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
            return as_scores(self._awaited(value), num_responses, correct_from=self._correct_from)
        except _FAILURES as error:
            return [self._failed(error, problem)] * num_responses

    def _score_at_once(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """Yield the scores in order, each as soon as it and those before it are known."""
        loop = self._event_loop()
        tasks = [loop.create_task(self._score_async(response, problem)) for response in responses]
        try:
            for task in tasks:
                yield loop.run_until_complete(task)
        finally:
            for task in tasks:
                task.cancel()

    async def _score_async(self, response: str, problem: Problem) -> Score:
        # Caught within the task: SystemExit would end the event loop while the other tasks are running.
        try:
            value = await self._function(**self._arguments(response, problem))
            return as_score(value, correct_from=self._correct_from)
        except _FAILURES as error:
            return self._failed(error, problem)

    def _arguments(self, response: str, problem: Problem) -> dict[str, Any]:
        truth = self._truth(problem.ground_truth, problem)
        if self._form == _OF_TEXTS:
            return {"response": response, **truth}
        conversation = [dict(message) for message in problem.messages]  # copied: the function may change it
        return {"messages": [*conversation, {"role": "assistant", "content": response}], **truth}

    def _truth(self, value: Any, problem: Problem) -> dict[str, Any]:
        """Return the ground truth as an argument; empty if the function lacks it, or uses its default for this row."""
        is_given = self.needs_truth or (self._takes_truth and problem.ground_truth)
        return {self._form[-1]: value} if is_given else {}

    def _awaited(self, value: Any) -> Any:
        """Return the value, awaited if it is a coroutine."""
        return self._event_loop().run_until_complete(_result(value)) if inspect.isawaitable(value) else value

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all calls: clients that a function keeps open belong to one loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop

    def _failed(self, error: BaseException, problem: Problem) -> Score:
        kind, location = type(error).__name__, self._location(error)
        if (kind, location) not in self._logged:
            self._logged.add((kind, location))
            logger.warning("the reward function failed on a response to prompt %r", problem.uid, exc_info=error)
        text = shorten(error, 200)
        return invalid_score(f"{kind}{f': {text}' if text else ''}{f' ({location})' if location else ''}")

    def _location(self, error: BaseException) -> str:
        """Return file and line of the error: the last frame in the user's file, otherwise the last frame."""
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        lines = [(file, line) for file, line in lines if file != __file__]
        lines = [(file, line) for file, line in lines if file == self._file] or lines
        return f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def _form_of(function: Callable[..., Any], name: str) -> tuple[tuple[str, ...], inspect.Parameter | None]:
    """Find the form of a function's parameters, and its parameter for the ground truth, None if it has none.

    Raises: ConfigError with the supported forms.
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # written in C, without a signature
        parameters = inspect.signature(function).parameters
    for form in _FORMS:
        truth = parameters.get(form[-1])
        is_given = all(key in parameters and parameters[key].kind in _BY_NAME for key in form[:-1])
        others = [parameter for key, parameter in parameters.items() if key not in form]
        if truth is None:  # and not in *args or **kwargs, where its name is unknown
            is_given = is_given and not any(p.kind in _REST for p in others)
        else:
            is_given = is_given and truth.kind in _BY_NAME
        if is_given and all(p.default is not p.empty or p.kind in _REST for p in others):
            return form, truth
    takes = f"takes ({', '.join(map(str, parameters.values()))})" if parameters else "names no parameters"
    *forms, last = (f"({', '.join(form)})" for form in _FORMS)
    raise ConfigError(
        f"--reward-type {name}: {takes}; a reward function takes {', '.join(forms)} or {last}, "
        "with or without the last parameter; all other parameters need defaults"
    )


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object of a class with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _result(awaitable: Any) -> Any:
    return await awaitable
