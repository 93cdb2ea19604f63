"""The base classes of an installed RL4LLM: pydantic models and a constructor that checks what it is given."""

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional, Union

import torch
from datasets import Dataset
from pydantic import BaseModel, Field, model_validator

MADE = []


class ChatMessage(BaseModel):
    role: str = Field(...)
    content: str = Field(...)

    @model_validator(mode="after")
    def check_role(self):
        if self.role not in ["user", "assistant", "system", "tool"]:
            raise ValueError(f"Invalid role {self.role}")
        return self


class SampleState(BaseModel):
    messages: List[ChatMessage] = Field(...)
    ground_truth: Union[str, float, int] = Field(...)
    init_msg_size: int = Field(...)
    current_step: int = Field(default=0)
    done: bool = Field(default=False)


class EnvState(BaseModel):
    sample_states: List[SampleState] = Field(...)


class BaseRewardFunction(ABC):
    def __init__(self, name: str):
        if not isinstance(name, str) or not name:
            raise TypeError("Reward function name must be a string.")
        self.name = name

    @abstractmethod
    def __call__(self, messages: List[ChatMessage], ground_truth: Union[str, float, int], **kwargs: Any) -> float:
        raise NotImplementedError


class BaseMDPEnv:
    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Any,
        reward_functions: List[BaseRewardFunction],
        batch_size: int,
        group_size: int,
        max_steps: int = 1,
        tool_schemas: Optional[List[Dict]] = None,
        seed: Optional[int] = 42,
        reward_transform_fn: Optional[Any] = None,
    ):
        if not all(isinstance(fn, BaseRewardFunction) for fn in reward_functions):
            raise ValueError("All reward_functions must be instances of BaseRewardFunction")
        if not isinstance(dataset, Dataset) or not {"messages", "ground_truth"} <= set(dataset.column_names):
            raise TypeError("dataset must be a datasets.Dataset")
        if len(reward_functions) > 1 and not reward_transform_fn:
            raise ValueError("Multiple reward functions provided without a reward_transform_fn.")
        self.reward_transform_fn = reward_transform_fn or (lambda rewards: next(iter(rewards.values())))
        self.tokenizer = tokenizer
        self.reward_functions = reward_functions
        self.max_steps = max_steps
        self.tool_schemas = tool_schemas
        self.logger = __import__("logging").getLogger("installed")
        MADE.append((batch_size, group_size, dataset[0]["ground_truth"]))

    def _calculate_rewards(self, batch_sample_states):
        rewards = {fn.name: torch.zeros(len(batch_sample_states)) for fn in self.reward_functions}
        for i, state in enumerate(batch_sample_states):
            for fn in self.reward_functions:
                reward = fn(state.messages, state.ground_truth)
                if not isinstance(reward, (float, int)):
                    raise ValueError(f"Reward func '{fn.name}' must return float/int")
                rewards[fn.name][i] = float(reward)
        return self.reward_transform_fn(rewards), rewards

    def _convert_to_batch_prompts(self, env_state: EnvState) -> List[str]:
        return [
            self.tokenizer.apply_chat_template(
                [message.model_dump() for message in state.messages],
                tools=self.tool_schemas,
                tokenize=False,
                add_generation_prompt=True,
            )
            for state in env_state.sample_states
        ]

    def _run_interaction_loop(
        self, env_state: EnvState, llm: Any, sampling_params: Dict[str, Any], **kwargs
    ) -> EnvState:
        raise NotImplementedError
