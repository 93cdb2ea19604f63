"""Test the coordinator's settings from flags."""

import pytest

from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.sample_selection import SelectionSettings
from coati_rl.config.cli import parse
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.types import SamplingParams


def settings_of(text):
    return coordinator_settings(parse(text.split())[0])


def test_sizes_come_from_the_version_algebra():
    # P * ibs = 3 * 8 = 24, tbs * dp = 4 * 2 = 8: K = 3; slots (1 + 1) * 24.
    settings = settings_of("-t 2 -i 3 -ibs 8 -tbs 4 -tMbs 2 -tmbs 3 -g 5 -nb 1 --seed 7 --max-failure-rate 0.1")
    assert (settings.sync_period, settings.num_slots, settings.num_trainers) == (3, 48, 2)
    assert (settings.batch.dp, settings.batch.prompts_per_step, settings.batch.prompts_per_mini_batch) == (2, 8, 4)
    assert settings.batch.train_microbatch_size == 3
    assert (settings.batch.max_tokens_per_microbatch, settings.batch.one_sample_per_row) == (None, False)
    assert settings.batch.shares_prefixes
    assert settings.max_failure_rate == 0.1
    assert settings.seed == 7


def test_updates_per_batch_make_the_sync_period_longer_and_the_slots_no_more():
    settings = settings_of("-t 2 -i 3 -ibs 8 -tbs 4 -tMbs 2 -tmbs 3 -g 5 -nb 1 --updates-per-batch 4")
    assert (settings.sync_period, settings.prompts_per_rollout, settings.num_slots) == (12, 24, 48)


def test_the_layout_of_micro_batches_comes_from_the_flags():
    settings = settings_of("--max-tokens-per-microbatch 8192 --one-sample-per-row -t 8 -tp 2 -pp 2")
    assert (settings.batch.max_tokens_per_microbatch, settings.batch.one_sample_per_row) == (8192, True)
    assert not settings.batch.shares_prefixes, "padded rows hold one sample each"
    assert not settings_of("--no-shared-prefix").batch.shares_prefixes
    assert (settings.batch.dp, settings.trainers_per_dp_rank, settings.batch.num_stages) == (2, 4, 2)


def test_training_samples_as_the_flags_say_and_evaluation_greedily():
    settings = settings_of("-temp 0.7 -topk 50 -topp 0.9 --min-p 0.1 -mnt 64 --stop END -g 5")
    train, evaluation = settings.sampling_plans["train"], settings.sampling_plans["eval"]
    assert train.group_size == 5
    cuts = {"top_k": 50, "top_p": 0.9, "min_p": 0.1}
    assert train.sampling == SamplingParams(temperature=0.7, **cuts, max_new_tokens=64, stop=("END",))
    assert evaluation.group_size == 1
    assert evaluation.sampling == SamplingParams(temperature=0.0, max_new_tokens=64, stop=("END",))


def test_evaluations_are_sampled_as_their_own_flags_say():
    settings = settings_of(
        "-topk 50 --min-p 0.1 -mnt 64 -g 5 --eval-samples 16 --eval-temperature 0.6 --eval-top-p 0.95"
    )
    evaluation = settings.sampling_plans["eval"]
    assert (evaluation.group_size, settings.sampling_plans["train"].group_size) == (16, 5)
    assert evaluation.sampling == SamplingParams(temperature=0.6, top_p=0.95, max_new_tokens=64)


def test_what_is_trained_of_a_group_comes_from_the_flags():
    settings = settings_of("-mnt 64 -t 2 -tbs 4 -tMbs 4")
    assert settings.batch.rules == GroupRules(max_new_tokens=64)
    assert (settings.batch.advantage_estimator, settings.batch.loss_variation) == ("group_norm", "sample_level")
    assert (settings.dynamic_batching, settings.max_empty_groups) == (False, 10 * 4 * 2)


def test_gdpo_knows_the_weights_of_each_tasks_rewards():
    rewards = "-rt boxed=1,/a/mine.py:score=0.2"
    settings = settings_of(f"{rewards} --advantage-estimator gdpo --reward-clip=-5,5 --reward-normalize")
    assert settings.batch.rules.decoupled_weights == {"default": {"boxed": 1.0, "mine.score": 0.2}}
    assert (settings.batch.normalizes_rewards, settings.batch.reward_clip) == (True, (-5.0, 5.0))
    assert settings_of(rewards).batch.rules.decoupled_weights == {}
    assert settings_of("-rt boxed --advantage-estimator gdpo").batch.rules.decoupled_weights == {}, "one is group_norm"


def test_dapo_is_a_matter_of_settings():
    settings = settings_of("-a DAPO -mnt 64 --reward-scale 2 --max-empty-batches 3 -t 2 -tbs 4 -tMbs 4")
    assert settings.batch.rules == GroupRules(
        max_new_tokens=64,
        filter_range=(0.0, 1.0),
        filter_truncated_response=True,
        over_length_cache=16,  # a quarter of the response
        reward_scale=2.0,
    )
    assert settings.batch.loss_variation == "token_level"
    assert (settings.dynamic_batching, settings.max_empty_groups) == (True, 3 * 4 * 2)


@pytest.mark.parametrize(("episode", "sampled", "in_all"), [(140, 40, 40), (164, 64, 64), (300, 64, 200)])
def test_the_tokens_of_an_episode_bound_its_responses_and_the_rules_of_length(episode, sampled, in_all):
    settings = settings_of(f"-a DAPO --tools calculator -mpt 100 -mnt 64 --max-episode-tokens {episode}")
    assert {plan.sampling.max_new_tokens for plan in settings.sampling_plans.values()} == {sampled}
    assert (settings.batch.rules.max_new_tokens, settings.batch.rules.over_length_cache) == (in_all, in_all // 4)


def test_intervals_that_are_off_are_none():
    assert (settings_of("-ei -1 -si -1").eval_interval, settings_of("-si -1").save_interval) == (None, None)
    settings = coordinator_settings(parse(["-ei", "5", "-ed", '{"t": "x"}', "-si", "9"])[0])
    assert (settings.eval_interval, settings.save_interval) == (5, 9)


@pytest.mark.parametrize(
    ("max_steps", "step", "num_done", "progress"),
    [
        (None, 0, 0, 0.0),
        (None, 3, 192, 192 / 1000),
        (None, 3, 400, 400 / 1000),  # 208 of them without effect
        (6, 3, 192, 3 / 6),  # steps end the run: 6 x 64 = 384 prompts
        (6, 3, 400, 3 / 6),
        (6, 3, 900, 900 / 1000),  # the data will end it before
        (99, 3, 192, 192 / 1000),  # the data end it: 15 steps
        (None, 15, 1000, 1.0),
        (6, 6, 384, 1.0),
    ],
)
def test_the_learning_rate_ends_with_the_data_or_with_max_steps(max_steps, step, num_done, progress):
    settings = settings_of("-tbs 32 -t 2" + (f" --max-steps {max_steps}" if max_steps else ""))
    assert settings.learning_rate_progress(step=step, num_done=num_done, num_prompts=1000) == progress


@pytest.mark.parametrize("max_steps", [1, 3, 7, 15, 16, 99])
def test_where_nothing_is_dropped_the_clock_is_prompts_over_prompts_due(max_steps):
    settings = settings_of(f"-tbs 32 -t 2 --max-steps {max_steps}")
    for step in range(min(max_steps, 15) + 1):
        progress = settings.learning_rate_progress(step=step, num_done=64 * step, num_prompts=1000)
        assert progress == min(1.0, 64 * step / min(1000, 64 * max_steps))


SELECTED = "-kl 0"


@pytest.mark.parametrize(
    ("flags", "is_selected"),
    [
        (SELECTED, True),
        ("", False),  # GRPO has KL in its loss
        (f"{SELECTED} --compute-all-samples", False),
        (f"{SELECTED} --entropy-coeff 0.01", False),
        (f"{SELECTED} --whiten-advantages", False),
        (f"{SELECTED} --policy-loss /a/mine.py:terms", False),
        (f"{SELECTED} --teacher /a/teacher", False),
        ("-kl 0.01 --kl-place reward", False),
        (f"{SELECTED} --policy-loss cispo --ratio-level sequence --loss-variation constant", True),
        (f"{SELECTED} --off-policy-correction tis --clip-dual 3 --skip-threshold None --updates-per-batch 2", True),
        (f"{SELECTED} --on-logprob-gap icepop --advantage-estimator /a/mine.py:advantage", True),
        *((f"-a {name}", True) for name in ("DAPO", "DR_GRPO", "GSPO", "CISPO")),
        *((f"-a {name}", False) for name in ("RLOO", "REINFORCE_PP", "REINFORCE_PP_BASELINE", "REINFORCE_PPB")),
        ("-a RLOO -kl 0", True),
    ],
)
def test_samples_of_advantage_0_are_left_out_only_where_they_have_no_gradient(flags, is_selected):
    assert (settings_of(flags).batch.selection is not None) == is_selected


def test_a_step_computes_the_tokens_that_the_mismatch_needs():
    def selection(flags):
        return settings_of(f"{SELECTED} -tbs 4 -tMbs 4 -ibs 4 --seed 7 {flags}").batch.selection

    # Weights of one version sample a whole step: the loss compares all its tokens.
    assert selection("-i 1 -t 1") == SelectionSettings(min_tokens=256, seed=7)
    assert selection("-i 1 -t 1 --logprob-gap-tokens 1000").min_tokens == 256
    # Else the first dp rank measures tokens of earlier weights.
    assert selection("-i 2 -t 2 -nb 1 --logprob-gap-tokens 1000").min_tokens == 2000
    assert selection("-i 2 -t 1 --logprob-gap-tokens 1000").min_tokens == 1000
    assert selection("-i 2 -t 1 --logprob-gap-tokens 0").min_tokens == 256


def test_with_a_critic_every_sample_is_computed():
    assert settings_of(SELECTED).batch.selection is not None
    assert not settings_of(SELECTED).batch.rules.has_token_rewards
    with_critic = settings_of(f"{SELECTED} --advantage-estimator gae").batch
    assert with_critic.selection is None and with_critic.rules.has_token_rewards
