"""Provide an agent in OpenRLHF's form, with rewards beyond any --filter-range, and scores within."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def step(self, states: dict, **kwargs):
        is_odd = len(states["action_text"]) % 2
        return {
            "rewards": 7.0 + is_odd,
            "scores": 0.25 + is_odd / 2,
            "environment_feedback": "",
            "done": True,
            "extra_logs": {"is_odd": is_odd, "said": states["action_text"]},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
