"""Test the flags of batch inference: what is refused, and what prompts and scorers are made of."""

import pytest

from coati_rl.config.cli import parse_job
from coati_rl.config.fields import described
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.errors import ConfigError

NEEDED = ["-m", "m", "-d", "d.jsonl", "-o", "out.jsonl"]


def config_of(*flags):
    config, is_dry_run = parse_job([*NEEDED, *flags], GenerateConfig)
    assert not is_dry_run
    check_generate(config)
    return config


def refusal(*flags):
    with pytest.raises(ConfigError) as raised:
        config_of(*flags)
    return str(raised.value)


def test_a_model_prompts_and_a_file_are_enough():
    config = config_of()
    assert not config.is_scored
    assert (config.sampling.num_generations, config.sampling.temperature, config.max_sequences) == (1, 1.0, 32)


def test_the_file_has_no_default():
    config, _ = parse_job(["-m", "m", "-d", "d.jsonl"], GenerateConfig)
    with pytest.raises(ConfigError, match="--output: where are the JSON lines written"):
        check_generate(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-g 4 -temp 0", "-g 4 with -temp 0: greedy samples of a prompt are all the same; use -g 1"),
        ("--pairs --min-reward 1 -g 4", "--pairs and --min-reward 1.0 without --reward-type"),
        ("--best-of -rt boxed", "--best-of: compares the samples of a prompt; give -g 2 or more"),
        ("--pairs -rt boxed", "--pairs: compares the samples of a prompt; give -g 2 or more"),
        ("--pairs --best-of -g 4 -rt boxed", "--best-of with --pairs: a pair has the best sample and another one"),
        ("-rt boxed --reward-template {input}", "must contain {input} and {reward}, as '{input} [{reward}]' does"),
        ("-rt bocksed", "bocksed"),
        ("-rt boxed,code", "a response has one ground truth"),
        ("-rt boxed --reward-normalize", "--reward-normalize: changes the rewards of a mini-batch in training"),
        (
            "-rt model:rm --reward-devices 2",
            "--reward-devices 2: reward models of batch inference are loaded in its own",
        ),
        ("--reward-normalize --reward-clip 0,1", "rewards are written as they are; leave them out"),
        ("-d a.jsonl=0.3,b.jsonl=0.7", "shares mix the prompts of a training run"),
        ("--input-template {} -s Hm.", "--input-template with --system-prompt"),
        ("-g 0", "--num-generations '0'"),
        ("-lr 1e-4", "-lr: is a flag of coati-rl rl"),
        ("--temprature 1", "did you mean --temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(flags, message):
    assert message in refusal(*flags.split())


def test_tasks_are_scored_all_or_none():
    tasks = '{"code": {"reward_type": "code"}}'
    assert "--tasks code: has a reward_type, and other rows have none" in refusal("--tasks", tasks)
    config_of("--tasks", tasks, "-rt", "boxed")


def test_prompts_and_scorers_are_made_of_the_same_settings_as_in_a_run():
    tasks = '{"short": {"max_new_tokens": 8, "reward_type": "think_answer_tags"}}'
    flags = ["-g", "4", "-temp", "0.5", "-rt", "boxed", "-mpt", "100", "-mnt", "20", "--tasks", tasks, "-s", "Hm."]
    run = config_of(*flags).as_run()
    assert (run.sampling.num_generations, run.sampling.temperature, run.max_model_len) == (4, 0.5, 120)
    assert (run.reward.reward_type, run.data.system_prompt, run.data.dataset) == ("boxed", "Hm.", "d.jsonl")
    assert run.by_task["short"].sampling.max_new_tokens == 8
    assert run.by_task["short"].reward.reward_type == "think_answer_tags"


def test_every_flag_has_help_and_a_short_name_is_used_once():
    fields = GenerateConfig.fields()
    assert all(field.description for field in fields.values())
    short = [described(field, "short") for field in fields.values() if described(field, "short")]
    assert len(short) == len(set(short))
