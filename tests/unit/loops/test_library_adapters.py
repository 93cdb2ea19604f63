"""Test that the library's trainer of adapters pushes them merged into the weights, and alone only where they fit."""

import numpy as np
import pytest

import coati
from coati_rl.errors import ConfigError, TransferError

LIMITS = {"max_prompt_tokens": 32, "max_new_tokens": 8}
GRPO = {**LIMITS, "kl_coeff": 0.0, "train_microbatch_size": 8}


def train(trainer, engine, *, steps=1, lr=1e-2):
    """Steps on two prompts with four completions each, whose rewards differ."""
    groups = engine.generate(["one plus one", [{"role": "user", "content": "hello"}]], n=4, seed=3)
    samples = [sample for group in groups for sample in coati.group_samples(group, [0.0, 1.0, 1.0, 0.0])]
    for _ in range(steps):
        trainer.forward_backward(samples)
        trainer.optim_step(lr)


def test_adapters_are_pushed_merged_into_the_weights(model_dir):
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
        coati.Trainer(model_dir, "grpo", lora_rank=4, **GRPO) as trainer,
    ):
        before = engine.generate(["hello"], temperature=0.0)[0][0]
        train(trainer, engine, steps=3, lr=5e-2)
        push = trainer.push_to(engine)
        assert (push.policy_version, push.identity) == (3, push.digest)
        assert push.gap < 1e-4
        after = engine.generate(["hello"], temperature=0.0)[0][0]
        assert abs(after.logprobs[0] - before.logprobs[0]) > 0.01
        (one,) = engine.generate(["hello"])[0]
        np.testing.assert_allclose(trainer.score([one.sample(0.0)])[0], one.logprobs, atol=1e-4)


@pytest.mark.full
def test_adapters_are_not_pushed_to_an_engine_that_takes_whole_weights(model_dir):
    flags = {"lora_rank": 4, "lora_sync": "adapter"}
    with pytest.raises(ConfigError, match="use --lora-sync merged"):
        coati.Engine(model_dir, backend="transformers", **flags, **LIMITS)
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
        coati.Trainer(model_dir, "grpo", **flags, **GRPO) as trainer,
    ):
        train(trainer, engine)
        with pytest.raises(TransferError, match="the engine serves whole weights"):
            trainer.push_to(engine, timeout_s=5.0)
