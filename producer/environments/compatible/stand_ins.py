"""Stand in for the modules that agents of RL4LLM and OpenRLHF import, where these systems are not installed.

Only what their documents have users import is there: base classes, and the types of a conversation. Sources:
github.com/OpenRLHF/OpenRLHF openrlhf/utils/agent.py, github.com/michaelnny/rl4llm rl4llm/core/base_env.py.
"""

import importlib.util
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class AgentInstanceBase:
    """Stand in for OpenRLHF's base class of environments."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the prompt as it is."""
        return states


class AgentExecutorBase:
    """Stand in for OpenRLHF's base class of agents that ask the engine themselves."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand in for OpenRLHF's loop over the steps of an AgentInstance, which is an episode here."""

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls


class ChatMessage(BaseModel):
    """Stand in for RL4LLM's message; it can be read as a dictionary, too."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class SampleState(BaseModel):
    """Stand in for RL4LLM's state of a sample."""

    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[ChatMessage]
    ground_truth: Any = None
    init_msg_size: int
    current_step: int = 0
    done: bool = False


class EnvState(BaseModel):
    """Stand in for RL4LLM's state of a batch; it holds one sample here."""

    sample_states: list[SampleState]


class BaseRewardFunction:
    """Stand in for RL4LLM's base class of rewards."""

    def __init__(self, name: str) -> None:
        self.name = name


class BaseMDPEnv:
    """Stand in for RL4LLM's base class of environments; data and batches are the run's.

    Args:
        tokenizer: of the run.
        reward_functions: called once an episode is over.
        max_steps: answers in an episode.
        tool_schemas: for the chat template.
        reward_transform_fn: makes one number of several rewards.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        reward_functions: list[Any],
        max_steps: int = 1,
        tool_schemas: list[dict[str, Any]] | None = None,
        reward_transform_fn: Any = None,
        **_: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.reward_functions = reward_functions
        self.max_steps = max_steps
        self.tool_schemas = tool_schemas
        self.reward_transform_fn = reward_transform_fn


_MODULES = {
    "openrlhf.utils.agent": (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor),
    "rl4llm.core.base_env": (ChatMessage, SampleState, EnvState, BaseRewardFunction, BaseMDPEnv),
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let these modules be imported; a system that is installed is imported itself."""
    added: dict[str, ModuleType] = {}
    for path, classes in _MODULES.items():
        if importlib.util.find_spec(path.partition(".")[0]) is not None:
            continue
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            added[name] = ModuleType(name)
            added[name].__path__ = []
        for each in classes:
            setattr(added[path], each.__name__, each)
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
