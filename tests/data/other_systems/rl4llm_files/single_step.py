"""An environment of one answer in the form of RL4LLM's SglMDPEnv, and one that is SglMDPEnv itself."""

import logging
from typing import Any, Dict, Optional

import torch
from rl4llm.constants import LOGGER_NAME
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState
from rl4llm.core.base_inference_client import InferenceClient
from rl4llm.envs.sgl_env import SglMDPEnv

logger = logging.getLogger(LOGGER_NAME)


class Correct(BaseRewardFunction):
    def __init__(self, name="correct"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        return 0.1 if messages[-1].content == ground_truth else 0.0


class OneStepEnv(BaseMDPEnv):
    @torch.inference_mode()
    def _run_interaction_loop(
        self,
        env_state: EnvState,
        llm: InferenceClient,
        sampling_params: Dict[str, Any],
        **kwargs: Optional[Dict[str, Any]],
    ) -> EnvState:
        outputs = llm.generate(prompts=self._convert_to_batch_prompts(env_state), sampling_params=sampling_params)
        for i, sample_state in enumerate(env_state.sample_states):
            text = outputs[i].get("text", "I can not answer this question").strip()
            sample_state.messages.append(ChatMessage(role="assistant", content=text))
            sample_state.done = True
            sample_state.current_step = 1
        return env_state


class TheirEnv(SglMDPEnv):
    pass
