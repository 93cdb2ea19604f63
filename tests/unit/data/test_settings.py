"""From the flags to what the coordinator works with."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.data.settings import coordinator_settings
from coati_rl.types import SamplingParams


def settings_of(text):
    return coordinator_settings(parse(text.split())[0])


def test_sizes_come_from_the_version_algebra():
    # P * ibs = 3 * 8 = 24, tbs * dp = 4 * 2 = 8: K = 3; slots (1 + 1) * 24; 10 % of 8 prompts x 5 samples may fail.
    settings = settings_of("-t 2 -i 3 -ibs 8 -tbs 4 -tMbs 2 -tmbs 3 -g 5 -nb 1 --seed 7 --max-failure-rate 0.1")
    assert (settings.sync_period, settings.num_slots, settings.num_trainers) == (3, 48, 2)
    assert (settings.batch.dp, settings.batch.prompts_per_step, settings.batch.prompts_per_mini_batch) == (2, 8, 4)
    assert settings.batch.train_microbatch_size == 3
    assert (settings.batch.max_tokens_per_microbatch, settings.batch.one_sample_per_row) == (None, False)
    assert settings.max_failed_samples == 4
    assert settings.seed == 7


def test_the_layout_of_micro_batches_comes_from_the_flags():
    settings = settings_of("--max-tokens-per-microbatch 8192 --one-sample-per-row -t 8 -tp 2 -pp 2")
    assert (settings.batch.max_tokens_per_microbatch, settings.batch.one_sample_per_row) == (8192, True)
    assert (settings.batch.dp, settings.ranks_per_dp_group) == (2, 4)


def test_training_samples_as_the_flags_say_and_evaluation_greedily():
    settings = settings_of("-temp 0.7 -topk 50 -topp 0.9 -mnt 64 --stop END -g 5")
    train, evaluation = settings.sampling_plans["train"], settings.sampling_plans["eval"]
    assert train.group_size == 5
    assert train.sampling == SamplingParams(temperature=0.7, top_k=50, top_p=0.9, max_new_tokens=64, stop=("END",))
    assert evaluation.group_size == 1
    assert evaluation.sampling == SamplingParams(temperature=0.0, max_new_tokens=64, stop=("END",))


@pytest.mark.parametrize(("flags", "recompute"), [("", False), ("-topk 50", True), ("-topp 0.9", True)])
def test_a_cut_distribution_makes_the_trainer_recompute_the_old_logprobs(flags, recompute):
    assert settings_of(flags).batch.recompute_old_logprobs is recompute


def test_intervals_that_are_off_are_none():
    assert (settings_of("-ei -1 -si -1").eval_interval, settings_of("-si -1").save_interval) == (None, None)
    settings = coordinator_settings(parse(["-ei", "5", "-ed", '{"t": "x"}', "-si", "9"])[0])
    assert (settings.eval_interval, settings.save_interval) == (5, 9)


@pytest.mark.parametrize(
    ("flags", "drawn", "due"), [("", 1000, 1000), ("--max-steps 3", 1000, 192), ("--max-steps 99", 100, 100)]
)
def test_the_learning_rate_ends_with_the_data_or_with_max_steps(flags, drawn, due):
    assert settings_of(f"-tbs 32 -t 2 {flags}").num_prompts_due(drawn) == due  # 3 steps x 32 x 2 = 192
