"""A reward function as OpenRLHF prints it: of a batch, with tensors."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    reward = torch.tensor(
        [2.0 * (label in query[len(prompt) :]) for query, prompt, label in zip(queries, prompts, labels)]
    )
    return {"rewards": reward, "scores": reward / 4, "extra_logs": {"custom_metric": reward.mean().item()}}
