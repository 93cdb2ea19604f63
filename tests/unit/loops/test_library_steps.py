"""Test which numbers a step of a library's trainer takes."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import coati
from coati_rl.errors import ConfigError
from tests.unit.loops.test_library import LIMITS

PROMPT = np.array([40, 41, 42, 43], dtype=np.int32)


def sample_of(number: int = 0, **arrays: Any) -> coati.Sample:
    ids, mask = np.arange(5, 9) + number, np.ones(4, dtype=bool)
    return coati.Sample(
        uid="p", number=number, prefix_ids=PROMPT, token_ids=ids, loss_mask=mask, arrays={"advantages": 1.0, **arrays}
    )


def reinforce(logprobs: Any, entropy: Any, arrays: Any) -> Any:
    return -torch.where(arrays["loss_mask"], logprobs * arrays["advantages"], 0.0).sum()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": -1e-3}, "lr=-0.001"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"adam_betas": (0.9, 1.5)}, "adam_betas=(0.9, 1.5)"),
        ({"adam_eps": 0.0}, "adam_eps=0.0"),
        ({"weight_decay": math.inf}, "weight_decay=inf"),
        ({"max_norm": 1.0}, "max_norm=...): a step has adam_betas"),
    ],
)
def test_a_number_that_ruins_weights_is_refused_and_the_step_can_be_taken_with_another(
    model_dir: Any, numbers: dict[str, Any], message: str
) -> None:
    with coati.Trainer(model_dir, reinforce, **LIMITS) as trainer:
        trainer.forward_backward([sample_of()])
        with pytest.raises(ConfigError) as refused:
            trainer.optim_step(**numbers)
        assert message in str(refused.value)
        step = trainer.optim_step(1e-3, max_grad_norm=math.inf, adam_betas=(0.8, 0.9))
        assert step["grad_norm"] > 0
        assert trainer.step == 1
        assert all(weight.isfinite().all() for weight in trainer.live_weights().values())
