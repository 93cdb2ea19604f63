"""Memory on GPUs: the bounds of micro-batches there, and updates that do not fit beside an engine."""

import pytest

from coati_rl.config import Config
from coati_rl.config.gpu_rules import check_staging, with_device_defaults
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

GIB = 2**30
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


def test_an_update_that_fits_beside_the_engine_passes() -> None:
    assert check_staging(Config(), update_bytes=6 * GIB, gpu_bytes=80 * GIB) == []


def test_7b_on_80_gib_is_refused_with_a_share_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        check_staging(Config(), update_bytes=15 * GIB, gpu_bytes=80 * GIB)
    message = str(caught.value)
    assert "--gpu-memory-utilization 0.85: " in message
    assert "takes 16.0 GiB, but 12.0 of 80.0 GiB are left" in message
    assert "use --gpu-memory-utilization 0.8 or less, or --weight-transport gloo" in message
    assert check_staging(Config(gpu_memory_utilization=0.8), update_bytes=15 * GIB, gpu_bytes=80 * GIB) == []


def test_an_update_that_never_fits_leaves_the_machines_memory() -> None:
    with pytest.raises(ConfigError, match=r"are left; use --weight-transport gloo"):
        check_staging(Config(), update_bytes=64 * GIB, gpu_bytes=40 * GIB)


def test_a_plan_for_gpus_elsewhere_says_how_large_they_have_to_be() -> None:
    (warning,) = check_staging(Config(gpu_memory_utilization=0.75), update_bytes=15 * GIB, gpu_bytes=None)
    assert "GPUs of 64 GiB or more" in warning
