"""An agent whose feedback has an image."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states: dict, **kwargs):
        return {"rewards": 0.0, "environment_feedback": "Look:", "environment_images": [object()], "done": False}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
