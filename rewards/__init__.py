"""Scores responses: response text and ground truth flow in, a `coati_rl.types.Score` flows out.

`get_reward(name)` is a plain function that scores one response in this process, without a time limit; `RewardPool`
scores groups in processes of its own, with one. Importing this package imports no engine and no sympy.
"""

from rewards.pool import RewardPool
from rewards.registry import SYSTEM_PROMPTS, RewardFn, default_system_prompt, get_reward

__all__ = ["SYSTEM_PROMPTS", "RewardFn", "RewardPool", "default_system_prompt", "get_reward"]
