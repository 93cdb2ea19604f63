"""Provide TRL to the tests of this directory."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest


@pytest.fixture(scope="module")
def trl():
    """Importing TRL takes seconds, and sets environment variables that are not for the tests that follow."""
    with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
        import trl.rewards
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer

    return SimpleNamespace(trainer=GRPOTrainer, gmpo=GMPOTrainer._compute_loss, rewards=trl.rewards)
