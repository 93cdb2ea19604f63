"""Test what bounds micro-batches on GPUs."""

import pytest

from coati_rl.config import Config
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.rules import check

SIZES = {"train_batch_size": 8, "train_minibatch_size": 8, "num_generations": 4, "inference_batch_size": 8}


def bounds(config: Config) -> tuple[int, int | None, bool]:
    return (
        config.parallel.train_microbatch_size,
        config.parallel.max_tokens_per_microbatch,
        config.parallel.gradient_checkpointing,
    )


def test_on_gpus_tokens_bound_a_micro_batch_and_activations_are_recomputed() -> None:
    config = with_device_defaults(Config(**SIZES), "cuda")
    assert bounds(config) == (32, 16384, True)
    check(config)


def test_the_budget_holds_the_longest_sample() -> None:
    config = with_device_defaults(Config(**SIZES, max_prompt_tokens=4096, max_new_tokens=28672), "cuda")
    assert config.parallel.max_tokens_per_microbatch == 32768
    check(config)


@pytest.mark.parametrize("said", [{"train_microbatch_size": 4}, {"max_tokens_per_microbatch": 8192}])
def test_what_the_user_has_bounded_stays(said: dict[str, int]) -> None:
    config = Config(**SIZES, **said)
    assert with_device_defaults(config, "cuda") == config


def test_checkpointing_that_was_switched_off_stays_off() -> None:
    assert not with_device_defaults(
        Config(**SIZES, gradient_checkpointing=False), "cuda"
    ).parallel.gradient_checkpointing


def test_a_cpu_has_the_bounds_of_the_flags() -> None:
    config = Config(**SIZES)
    assert bounds(with_device_defaults(config, "cpu")) == bounds(config) == (2, None, False)
