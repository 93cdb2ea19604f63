"""Hold a trajectory as its line in the rollout files has it (docs/rollouts.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coati_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRollout:
    """One trajectory of a step; `line` has all fields, those of its tokens too."""

    step: int
    uid: str
    sample: int
    episode: int
    prompt: str
    truth: str
    response: str
    num_tokens: int
    finish_reason: str
    policy_versions: tuple[int, ...]  # lowest and highest; empty: no token was sampled
    reward: float | None  # None: it could not be scored
    verdict: str
    detail: str
    is_trained: bool
    advantage: float | None  # None: not in the loss
    messages: Sequence[Mapping[str, Any]]  # of an environment's conversation; empty: prompt and response are all
    line: Mapping[str, Any]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Return the trajectory of a line. Raises: ConfigError naming a field that it lacks."""
        try:
            return cls(
                step=line["step"],
                uid=line["uid"],
                sample=line["sample"],
                episode=line["episode"],
                prompt=line["prompt"],
                truth=line["gt_answer"],
                response=line["response"],
                num_tokens=line["num_tokens"],
                finish_reason=line["finish_reason"],
                policy_versions=tuple(line["policy_versions"]),
                reward=line["reward"],
                verdict=line["verdict"],
                detail=line["detail"],
                is_trained=line["is_trained"],
                advantage=line["advantage"],
                messages=line.get("messages", ()),
                line=line,
            )
        except KeyError as error:
            raise ConfigError(f"a rollout has no field {error}; it was written by another version") from error

    def conversation(self) -> list[tuple[str, str]]:
        """Return who said what, in order; without an environment the answer alone, whose prompt is `prompt`."""
        if self.messages:
            return [(str(each.get("role", "?")), _said(each)) for each in self.messages]
        if "text" in self.line:
            return [("text", self.line["text"])]
        return [("answer", self.response)]


def _said(message: Mapping[str, Any]) -> str:
    """Return a message's text, and the calls of tools in it."""
    content = message.get("content") or ""
    parts = [each.get("text", "") for each in content] if isinstance(content, list) else [str(content)]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append(f"-> {function.get('name')}({function.get('arguments', '')})")
    return "\n".join(part for part in parts if part)
