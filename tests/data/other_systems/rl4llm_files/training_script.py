"""A training script of RL4LLM, which has its rewards in it."""

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.data import load_multiple_datasets
from rl4llm.trainers.grpo_trainer import GRPOTrainer


class Reward(BaseRewardFunction):
    def __init__(self, name="reward"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        return 1.0
