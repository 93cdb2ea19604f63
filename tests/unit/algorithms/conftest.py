"""Provide TRL to the tests of this directory."""

from types import SimpleNamespace

import pytest

from tests.unit.algorithms.importing_trl import importing_trl


@pytest.fixture(scope="module")
def trl():
    with importing_trl():
        import trl.rewards
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer

    return SimpleNamespace(trainer=GRPOTrainer, gmpo=GMPOTrainer._compute_loss, rewards=trl.rewards)
