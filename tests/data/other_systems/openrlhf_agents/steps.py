"""An AgentInstance and its executor, with OpenRLHF's logger, tensors and annotations."""

from typing import Any, Dict

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.turn += 1
        logger.info("turn %s of %s", self.turn, states["label"])
        budget = states["sampling_params"].max_tokens
        return {
            "rewards": torch.tensor(0.5 * self.turn),
            "scores": torch.tensor([0.25 * self.turn]),
            "environment_feedback": "\nAgain: ",
            "done": self.turn >= 3,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turn_count": torch.tensor(self.turn), "budget": budget, "said": states["action_text"]},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
