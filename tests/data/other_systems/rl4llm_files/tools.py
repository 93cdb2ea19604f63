"""An environment in the form of RL4LLM's SglToolMDPEnv: it parses calls of a tool, and rewards their use."""

import json
import re
from typing import Any, Dict, List

import torch
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState, SampleState

TOOL_SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "number"}}}},
        },
    }
]


class Accuracy(BaseRewardFunction):
    def __init__(self, name="accuracy_reward"):
        super().__init__(name)

    def __call__(self, messages: List[ChatMessage], ground_truth, **kwargs: Any) -> float:
        return 1.0 if messages[-1].content == ground_truth else -1.0


class ToolUsage(BaseRewardFunction):
    def __init__(self, name: str = "tool_usage_reward", bonus: float = 0.25):
        super().__init__(name)
        self.bonus = bonus

    def __call__(self, messages: List[ChatMessage], ground_truth, **kwargs: Any) -> float:
        return sum(self.bonus for message in messages if message.role == "tool")


def reward_transform_fn(reward_dict: Dict[str, torch.Tensor]) -> torch.Tensor:
    if "accuracy_reward" not in reward_dict:
        raise ValueError("accuracy_reward is missing from reward_dict.")
    final_reward = reward_dict["accuracy_reward"].clone()
    final_reward += reward_dict["tool_usage_reward"].to(final_reward.device)
    return final_reward


class ToolEnv(BaseMDPEnv):
    def __init__(self, **kwargs):
        super().__init__(tool_schemas=TOOL_SCHEMAS, **kwargs)

    def _call(self, text: str, sample_state: SampleState) -> List[str]:
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return [str(sum(json.loads(call)["arguments"]["numbers"])) for call in calls]

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state: EnvState, llm, sampling_params: Dict[str, Any], **kwargs) -> EnvState:
        active = {i: i for i, s in enumerate(env_state.sample_states) if not s.done}
        for _ in range(self.max_steps):
            if not active:
                break
            prompts = [
                self.tokenizer.apply_chat_template(
                    [message.model_dump(exclude_none=True) for message in env_state.sample_states[i].messages],
                    tools=self.tool_schemas,
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for i in active
            ]
            for i, output in zip(list(active), llm.generate(prompts=prompts, sampling_params=sampling_params)):
                state = env_state.sample_states[i]
                text = output["text"].strip()
                state.messages.append(ChatMessage(role="assistant", content=text))
                state.current_step += 1
                results = self._call(text, state)
                for result in results:
                    state.messages.append(ChatMessage(role="tool", content=result))
                if not results or state.current_step >= self.max_steps:
                    state.done = True
                    active.pop(i)
        for state in env_state.sample_states:
            if state.messages[-1].role != "assistant":
                self.logger.warning("ended by the limit of steps")
                state.messages.append(ChatMessage(role="assistant", content="<Interaction ended by step limit>"))
        return env_state
