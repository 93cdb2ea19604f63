"""Play episodes in which the policy calls tools: an answer without a call ends the episode."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from producer.environments.episode import Action, EpisodeTask, Message, Observation, Step
from producer.environments.episode_host import ThreadHost
from producer.tools.call_formats import ToolCallFormat, answer_text
from producer.tools.call_formats.answer import ParsedAnswer, with_plain_ids
from producer.tools.call_rules import CallRules
from producer.tools.toolbox import Toolbox

_ALL = CallRules()


class ToolEpisode:
    """Implement `Episode` with tools; its reward is that of -rt, for the last answer.

    Each call is answered by a message of the role tool, also one that has failed. What is wrong with calls that cannot
    be read is said after the results of the others, or in a message of the user where there are none. An answer that
    the token limit cuts ends the episode.

    Args:
        toolbox: of the producer.
        tool_format: in which the policy writes calls.
        tokenizer: of the model.
        rules: of its chat template. Calls behind the first are not run where it writes one, which the policy reads.
    """

    def __init__(
        self, toolbox: Toolbox, tool_format: ToolCallFormat, tokenizer: Any, *, rules: CallRules = _ALL
    ) -> None:
        self._tools = toolbox.open()
        self._format = tool_format
        self._tokenizer = tokenizer
        self._rules = rules

    async def reset(self, task: EpisodeTask) -> Observation:
        """See `Episode.reset`: the dataset's prompt was rendered with the tools."""
        return None

    async def step(self, action: Action) -> Step:
        """See `Episode.step`. Raises: EpisodeFailure if a tool is broken."""
        parsed = self._parsed(action)
        if action.finish_reason == "length" or not (parsed.calls or parsed.errors):
            return Step(reward={}, done=True)
        results = await self._tools.run(parsed.calls)
        messages: list[Message] = [result.message for result in results]
        if parsed.errors:
            problems = "\n".join(f"Error: a tool call could not be read: {error}" for error in parsed.errors)
            if messages:
                messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{problems}"}
            else:
                messages = [{"role": "user", "content": f"{problems}\nThe tools are {', '.join(self._tools.names)}."}]
        return Step(
            answer=parsed.message() if parsed.calls else None,
            observation=messages,
            reward={},
            info={"tools": [result.record for result in results], "unreadable_calls": len(parsed.errors)},
        )

    async def close(self) -> None:
        await self._tools.close()

    def _parsed(self, action: Action) -> ParsedAnswer:
        """Return the calls of an answer as the chat template takes them."""
        parsed = self._format.parse(answer_text(self._tokenizer, action.token_ids), turn=action.turn)
        if not self._rules.takes_ids:
            parsed = with_plain_ids(parsed, turn=action.turn)
        if self._rules.takes_several or len(parsed.calls) <= 1:
            return parsed
        problem = f"an answer may hold one call; of these {len(parsed.calls)}, only the first was run"
        return replace(parsed, calls=parsed.calls[:1], errors=(*parsed.errors, problem))


class ToolHost(ThreadHost):
    """Implement `EpisodeHost` for episodes with tools, which are async, and end the tools with it."""

    def __init__(self, make_episode: Callable[[], ToolEpisode], toolbox: Toolbox, *, timeout_s: float) -> None:
        super().__init__(make_episode, timeout_s=timeout_s, has_own_copies=False)
        self._toolbox = toolbox

    def close(self) -> None:
        super().close()
        self._toolbox.close()
