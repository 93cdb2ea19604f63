"""The executor of one answer, with the file of its reward beside it."""

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(remote_rm_url="reward_func.py")
