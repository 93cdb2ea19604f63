"""Offer a user's own function as a tool: its schema comes from its signature and docstring."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from coati_rl.text import shorten
from producer.environments.episode import EpisodeFailure
from producer.environments.loop_thread import is_cancellation
from producer.tools.tool import Schema, Tool, ToolError

_MAX_STUCK = 256  # threads of calls that were given up


class OwnFunction:
    """Implement `ToolKit` and `Tool` with a function, sync or async, that serves all episodes.

    What it raises is the call's result. ConnectionError, TimeoutError and EpisodeFailure say that the tool itself is
    broken, and make the sample invalid, as a call does that takes too long.

    Args:
        name: FILE.py:FUNCTION, with an absolute path.
    Raises: ConfigError for a function without types or a docstring that describes its arguments.
    """

    def __init__(self, name: str) -> None:
        from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

        self._function: Callable[..., Any] = load_function(name, flag="--tools")
        try:
            self.schema: Schema = get_json_schema(self._function)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"--tools {name}: give each argument a type, and a line in the docstring's Args: {error}"
            ) from error
        self._stuck: set[Future[Any]] = set()

    @property
    def schemas(self) -> Sequence[Schema]:
        return (self.schema,)

    def open(self) -> Sequence[Tool]:
        return [_OfEpisode(self)]

    def close(self) -> None:
        """See `ToolKit.close`; threads that hang end with the process."""

    async def call(self, arguments: dict[str, Any]) -> str:
        try:
            if inspect.iscoroutinefunction(self._function):
                returned = await self._awaited(arguments)
            else:
                returned = await self._in_thread(arguments)
        except (EpisodeFailure, ToolError):
            raise
        except (ConnectionError, TimeoutError) as error:
            raise EpisodeFailure(f"{type(error).__name__}: {shorten(error, 200)}") from error
        except Exception as error:  # whatever a user's function raises
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return returned if isinstance(returned, str) else _as_json(returned)

    async def _awaited(self, arguments: dict[str, Any]) -> Any:
        try:
            return await self._function(**arguments)
        except BaseException as error:  # a SystemExit would end the event loop
            if isinstance(error, Exception) or is_cancellation(error):
                raise
            raise RuntimeError(repr(error)) from error

    async def _in_thread(self, arguments: dict[str, Any]) -> Any:
        self._stuck = {call for call in self._stuck if not call.done()}
        if len(self._stuck) >= _MAX_STUCK:
            raise EpisodeFailure(f"{len(self._stuck)} calls of it hang")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # else a call that is given up would cancel it

        def run() -> None:
            try:
                returned = self._function(**arguments)
            except BaseException as error:  # noqa: BLE001 - a user's function may raise SystemExit
                # asyncio's futures take no StopIteration.
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if is_plain else RuntimeError(repr(error)))
            else:
                future.set_result(returned)

        threading.Thread(target=run, name="tool", daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._stuck.add(future)
            raise


class _OfEpisode:
    def __init__(self, function: OwnFunction) -> None:
        self.schema = function.schema
        self.call = function.call

    async def close(self) -> None:
        pass


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
