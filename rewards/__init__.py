"""Score responses: a `coati_rl.types.Score` from response text and ground truth.

`get_reward(name)` returns a function that scores one response in this process, without a time limit; `RewardPool`
scores groups in worker processes, with a time limit. Importing this package imports neither an engine nor sympy.
"""

from rewards.registry import SYSTEM_PROMPTS, default_system_prompt, get_reward, make_reward
from rewards.reward import Reward, RewardFn
from rewards.workers.pool import RewardPool

__all__ = ["SYSTEM_PROMPTS", "Reward", "RewardFn", "RewardPool", "default_system_prompt", "get_reward", "make_reward"]
