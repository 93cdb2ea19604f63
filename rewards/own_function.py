"""Call a user's reward function, FILE.py:FUNCTION, and convert what it returns or raises to scores.

The names of its parameters decide how it is called, see `rewards.function_forms`. A class is made without arguments,
and its object is called, as RL4LLM's rewards are.

The ground truth may be omitted from the parameters, or have a default for rows without one. A function may be a
coroutine function; if it takes one response, it then runs concurrently for all responses of a call, in one event loop
for the life of the process. An exception becomes an invalid score with the exception and the line of the user's code,
and the run continues. The function is called in one thread.

The file is imported in the driver, in the producers and in the processes that score: load large objects, and those on a
GPU, at the first call.
"""

import asyncio
import copy
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.function_forms import form_of
from rewards.returned_value import as_score, as_scores
from rewards.reward import invalid_score

logger = logging.getLogger(__name__)

_FAILURES = (Exception, SystemExit, asyncio.CancelledError)  # raised by the user's code: recorded as invalid scores


class ChatMessage(dict[str, Any]):
    """Hold a message whose fields are items and attributes, as those of RL4LLM."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return a plain dictionary, as pydantic's method does."""
        return dict(self)


class OwnFunctionReward:
    """Implement `Reward` with a user's function.

    Args:
        name: FILE.py:FUNCTION, with an absolute path.
        correct_from: reward that makes an answer correct if the function does not say whether it is.
    Raises: ConfigError if there is no such function, or its parameters have none of the forms.
    """

    def __init__(self, name: str, *, correct_from: float = 1.0) -> None:
        self._correct_from = correct_from
        self._function = _made(load_function(name, flag="--reward-type"), name)
        self._file = str(Path(name.rpartition(":")[0]))
        self._form = form_of(self._function, name)
        given = getattr(self._function, "name", None)
        self.own_name = given if isinstance(given, str) else None  # that RL4LLM's classes give themselves
        self.needs_truth = self._form.needs_truth
        self.columns = self._form.columns
        self.is_batch = self._form.is_batch
        self._is_async = _is_coroutine_function(self._function)
        self.is_concurrent = self._is_async and not self.is_batch  # responses of a call run at the same time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged: set[tuple[str, str]] = set()  # exception types and lines whose traceback has been logged

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        if self.is_batch:
            yield from self._score_group(responses, problem)
        elif self._is_async:
            yield from self._score_at_once(responses, problem)
        else:
            for response in responses:
                yield self._score_one(response, problem)

    def _score_one(self, response: str, problem: Problem) -> Score:
        try:
            return self._score_of(self._awaited(self._function(**self._arguments(response, problem))))
        except _FAILURES as error:
            return self._failed(error, problem)

    def _score_group(self, responses: Sequence[str], problem: Problem) -> list[Score]:
        num_responses = len(responses)
        try:
            value = self._awaited(self._function(**self._group_arguments(responses, problem)))
            return as_scores(value, num_responses, correct_from=self._correct_from)
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
            return self._score_of(await self._function(**self._arguments(response, problem)))
        except _FAILURES as error:
            return self._failed(error, problem)

    def _arguments(self, response: str, problem: Problem) -> dict[str, Any]:
        truth = self._truth(problem.ground_truth, problem)
        if self._form.name == "texts":
            return {"response": response, **truth}
        if self._form.name == "verl":
            columns = {"data_source": "", "extra_info": None, **problem.columns}
            return {"solution_str": response, **truth, **{key: columns[key] for key in self._form.parameters}}
        # Copied: the function may change them.
        messages = [dict(message) for message in (*problem.messages, {"role": "assistant", "content": response})]
        if self._form.name == "rl4llm":
            of_row = self._rest(problem, {"messages", "ground_truth"})
            return {"messages": [*map(ChatMessage, messages)], **truth, **of_row}
        return {"messages": messages, **truth}

    def _group_arguments(self, responses: Sequence[str], problem: Problem) -> dict[str, Any]:
        num_responses = len(responses)
        if self._form.name == "group":
            return {
                "queries": [problem.prompt + response for response in responses],
                "prompts": [problem.prompt] * num_responses,
                **self._truth([problem.ground_truth] * num_responses, problem),
            }
        columns = {key: value for key, value in problem.columns.items() if key in self._form.parameters}
        columns |= self._rest(problem, {"prompt", "completion"})
        values: dict[str, Any] = {key: [copy.deepcopy(value) for _ in responses] for key, value in columns.items()}
        text = problem.columns.get("prompt") if problem.columns.get("messages") is None else None
        if isinstance(text, str) or not problem.messages:  # a prompt of plain text, as TRL's standard format has
            values |= {"prompts": [problem.prompt if text is None else text] * num_responses}
            values["completions"] = [*responses]
        else:
            values["prompts"] = [[dict(message) for message in problem.messages] for _ in responses]
            values["completions"] = [[{"role": "assistant", "content": response}] for response in responses]
        if "prompts" not in self._form.parameters and not self._form.takes_rest:
            del values["prompts"]
        return values

    def _rest(self, problem: Problem, others: Collection[str]) -> dict[str, Any]:
        """Return the columns for a function's **kwargs."""
        if not self._form.takes_rest:
            return {}
        return {key: value for key, value in problem.columns.items() if key not in others}

    def _score_of(self, value: Any) -> Score:
        if self._form.name == "verl" and isinstance(value, Mapping):  # {"score": ..., "acc": ..., further values}
            names = {"score": "reward", "acc": "answer_correct"}
            value = {names.get(key, key): each for key, each in value.items()}
        return as_score(value, correct_from=self._correct_from)

    def _truth(self, value: Any, problem: Problem) -> dict[str, Any]:
        """Return the ground truth as an argument; empty if the function lacks it, or uses its default for this row."""
        name = self._form.truth
        return {name: value} if name is not None and (self.needs_truth or problem.ground_truth) else {}

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


def _made(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function, or the object of a class. Raises: ConfigError if it cannot be made."""
    if not inspect.isclass(function):
        return function
    try:
        made: Any = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--reward-type {name}: the class cannot be made without arguments: {type(error).__name__}: {error}; give "
            "its parameters defaults"
        ) from error
    if not callable(made):
        raise ConfigError(f"--reward-type {name}: the class has no __call__; give it one, or name a function")
    called: Callable[..., Any] = made
    return called


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object of a class with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _result(awaitable: Any) -> Any:
    return await awaitable
