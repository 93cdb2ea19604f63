"""Rewards, their transformer and an environment, as RL4LLM's README sketches them."""

from typing import Any, Dict, List, Optional, Union

import torch
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState


class AccuracyReward(BaseRewardFunction):
    def __init__(self, name: str = "accuracy_reward", **kwargs):
        super().__init__(name)

    def __call__(
        self, messages: List[ChatMessage], ground_truth: Union[str, float, int], **kwargs: Dict[str, Any]
    ) -> float:
        return float(messages[-1].content.strip() == str(ground_truth))


class LengthReward(BaseRewardFunction):
    def __init__(self, name: str = "length_reward", **kwargs):
        super().__init__(name)

    def __call__(
        self, messages: List[ChatMessage], ground_truth: Union[str, float, int], **kwargs: Dict[str, Any]
    ) -> float:
        return 0.5 if len(messages[-1].model_dump()["content"]) < 10 else 0.0


def my_reward_transformer(reward_dict: Dict[str, torch.Tensor]) -> torch.Tensor:
    combined_reward = 0.7 * reward_dict["accuracy_reward"] + 0.3 * reward_dict["length_reward"]
    return combined_reward


class CustomEnv(BaseMDPEnv):
    @torch.inference_mode()
    def _run_interaction_loop(
        self,
        env_state: EnvState,
        llm: Any,
        sampling_params: Dict[str, Any],
        **kwargs: Optional[Dict[str, Any]],
    ) -> EnvState:
        assert isinstance(env_state, EnvState) and isinstance(env_state.sample_states[0].messages[0], ChatMessage)
        prompts = self._convert_to_batch_prompts(env_state)
        sampling_params["max_new_tokens"] = min(8, sampling_params["max_new_tokens"])
        outputs = llm.generate(prompts=prompts, sampling_params=sampling_params)
        for sample, output in zip(env_state.sample_states, outputs):
            self.logger.info("answered: %s", output["text"])
            sample.messages.append(ChatMessage(role="assistant", content=output["text"].strip()))
            sample.done = True
        return env_state
