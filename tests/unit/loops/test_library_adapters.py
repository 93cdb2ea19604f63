"""Test that a loop of one's own pushes adapters as a run does."""

import numpy as np
import pytest

import coati
from coati_rl.errors import ConfigError, TransferError
from tests.unit.loops.test_library import GRPO, LIMITS, engine, samples, train  # noqa: F401, fixtures


def test_adapters_are_pushed_merged_into_the_weights(model_dir, samples):  # noqa: F811
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as served,
        coati.Trainer(model_dir, "grpo", lora_rank=4, **GRPO) as trainer,
    ):
        before = served.generate(["hello"], temperature=0.0)[0][0]
        train(trainer, samples, steps=3, lr=5e-2)
        push = trainer.push_to(served)
        assert (push.policy_version, push.identity) == (3, push.digest)
        assert push.gap < 1e-4
        after = served.generate(["hello"], temperature=0.0)[0][0]
        assert abs(after.logprobs[0] - before.logprobs[0]) > 0.01
        (one,) = served.generate(["hello"])[0]
        np.testing.assert_allclose(trainer.score([one.sample(0.0)])[0], one.logprobs, atol=1e-4)


def test_adapters_are_not_pushed_to_an_engine_that_takes_whole_weights(model_dir, samples):  # noqa: F811
    flags = {"lora_rank": 4, "lora_sync": "adapter"}
    with pytest.raises(ConfigError, match="use --lora-sync merged"):
        coati.Engine(model_dir, backend="transformers", **flags, **LIMITS)
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as served,
        coati.Trainer(model_dir, "grpo", **flags, **GRPO) as trainer,
    ):
        train(trainer, samples)
        with pytest.raises(TransferError, match="the engine serves whole weights"):
            trainer.push_to(served, timeout_s=5.0)
