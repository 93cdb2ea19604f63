"""Stand in for RL4LLM's base classes of environments and rewards, and for its environment of one answer.

Source: github.com/michaelnny/rl4llm rl4llm/core/base_env.py and rl4llm/envs/sgl_env.py. Data, batches and tokens are
the run's: an environment has one sample.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LOGGER_NAME = "rl4llm"


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


class EpisodeData:
    """Stand in for RL4LLM's recorded episode, which annotations name; the run records its own."""


class InferenceClient:
    """Stand in for RL4LLM's client of a server, which annotations name."""


class BaseRewardFunction:
    """Stand in for RL4LLM's base class of rewards."""

    def __init__(self, name: str) -> None:
        self.name = name


class BaseMDPEnv:
    """Stand in for RL4LLM's base class of environments.

    Args:
        dataset: of theirs, as `batch_size`, `group_size`, `rank`, `world_size`, `shuffle_dataset` and `num_workers`:
            rows and batches are the run's.
        tokenizer: of the run.
        reward_functions: called once an episode is over.
        max_steps: answers in an episode.
        tool_schemas: for the chat template.
        seed: of `random_state`.
        reward_transform_fn: makes one number of several rewards.
    Raises: ValueError, as theirs, for several rewards of which nothing makes one.
    """

    def __init__(
        self,
        dataset: Any = None,
        tokenizer: Any = None,
        reward_functions: Sequence[Any] = (),
        batch_size: int = 1,
        group_size: int = 1,
        max_steps: int = 1,
        tool_schemas: list[dict[str, Any]] | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle_dataset: bool = True,
        num_workers: int = 0,
        reward_transform_fn: Callable[..., Any] | None = None,
    ) -> None:
        if len(reward_functions) > 1 and reward_transform_fn is None:
            raise ValueError("several reward functions without a reward_transform_fn")
        self.tokenizer = tokenizer
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.reward_functions = list(reward_functions)
        self.reward_transform_fn = reward_transform_fn
        self.max_steps = max_steps
        self.tool_schemas = tool_schemas
        self.batch_size, self.group_size, self.rank, self.world_size = batch_size, group_size, rank, world_size
        self.seed = seed
        self.logger = logging.getLogger(LOGGER_NAME)

    @property
    def random_state(self) -> Any:
        """Return a generator of NumPy's, which is made at its first use."""
        import numpy as np

        return self.__dict__.setdefault("_random_state", np.random.RandomState(self.seed))

    def _convert_to_batch_prompts(self, env_state: EnvState) -> list[str]:
        """Return each conversation as text; one that ends with the policy's turn is to be continued."""
        texts = []
        for sample in env_state.sample_states:
            merged: list[dict[str, Any]] = []
            for message in sample.messages:
                if merged and message.role == merged[-1]["role"] == "assistant":
                    merged[-1]["content"] += message.content
                else:
                    merged.append(message.model_dump())
            goes_on = merged[-1]["role"] == "assistant"
            text = self.tokenizer.apply_chat_template(
                merged,
                tools=self.tool_schemas,
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
            texts.append(text)
        return texts

    def _calculate_rewards(self, batch_sample_states: Sequence[SampleState]) -> tuple[Any, dict[str, Any]]:
        """Return float[B], one reward of each sample, and those that it was made of by name."""
        import torch  # many agents do without

        # float32 as theirs; a reward of which nothing else is made is not rounded to it.
        dtype = torch.float64 if self.reward_transform_fn is None else torch.float32
        rewards = {each.name: torch.zeros(len(batch_sample_states), dtype=dtype) for each in self.reward_functions}
        for index, sample in enumerate(batch_sample_states):
            for each in self.reward_functions:
                rewards[each.name][index] = each(sample.messages, sample.ground_truth)
        return self._transform_rewards(rewards), rewards

    def _transform_rewards(self, rewards_dict: dict[str, Any]) -> Any:
        """Return float[B], the rewards of which `reward_transform_fn` makes one. Raises: ValueError for others."""
        import torch

        if self.reward_transform_fn is None:
            return next(iter(rewards_dict.values()))
        given = {name: values.clone() for name, values in rewards_dict.items()}  # some add to them in place
        made = torch.as_tensor(self.reward_transform_fn(given))
        shape = next(iter(rewards_dict.values())).shape
        if made.shape != shape:
            raise ValueError(f"reward_transform_fn returned the shape {tuple(made.shape)}, {tuple(shape)} is expected")
        return made


class SglMDPEnv(BaseMDPEnv):
    """Stand in for RL4LLM's environment of one answer."""

    def _run_interaction_loop(self, env_state: EnvState, llm: Any, sampling_params: Any, **_: Any) -> EnvState:
        """Ask once for each sample."""
        outputs = llm.generate(prompts=self._convert_to_batch_prompts(env_state), sampling_params=sampling_params)
        for sample, output in zip(env_state.sample_states, outputs, strict=True):
            sample.messages.append(ChatMessage(role="assistant", content=output["text"].strip()))
            sample.done, sample.current_step = True, 1
        return env_state
