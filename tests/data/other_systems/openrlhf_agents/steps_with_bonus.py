"""An executor that plays the steps by super().execute, as a later OpenRLHF names its arguments."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states: dict, **kwargs):
        import torch

        self.turn += 1
        return {
            "rewards": torch.tensor(1.0),
            "scores": 0.5,
            "environment_feedback": "\nAgain: ",
            "done": self.turn == 2,
            "extra_logs": {"turns": self.turn},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        output = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        output["reward"] += 0.25
        return output
