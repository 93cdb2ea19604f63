"""Correct the policy: RL4LLM's classes as its README sketches them (section Customization), filled in.

coati-rl rl --env rl4llm_env.py ...
"""

from typing import Any

import torch
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState


class CustomReward(BaseRewardFunction):
    def __init__(self, name: str = "correct", **kwargs):
        super().__init__(name)

    def __call__(self, messages: list[ChatMessage], ground_truth: str | float | int, **kwargs: Any) -> float:
        return float(messages[-1].content == str(ground_truth))


class CustomEnv(BaseMDPEnv):
    @torch.inference_mode()
    def _run_interaction_loop(self, env_state: EnvState, llm: Any, sampling_params: dict[str, Any], **kwargs) -> EnvState:  # noqa: E501 # fmt: skip
        for _ in range(self.max_steps):
            active = [sample for sample in env_state.sample_states if not sample.done]
            if not active:
                break
            prompts = [
                self.tokenizer.apply_chat_template(
                    [message.model_dump() for message in sample.messages], tokenize=False, add_generation_prompt=True
                )
                for sample in active
            ]
            outputs = llm.generate(prompts=prompts, sampling_params=sampling_params)
            for sample, output in zip(active, outputs, strict=True):
                answer = output["text"].strip()
                sample.messages.append(ChatMessage(role="assistant", content=answer))
                sample.current_step += 1
                sample.done = answer == str(sample.ground_truth)
                if not sample.done and sample.current_step < self.max_steps:
                    sample.messages.append(ChatMessage(role="user", content="No. Try again."))
        return env_state
