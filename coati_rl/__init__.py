"""Provide what the rollout service (producer/), the training service (consumer/) and the rewards share.

Nothing here imports an inference or a training engine; Ray is imported in coati_rl/runtime alone.
"""

__version__ = "0.2.0"
