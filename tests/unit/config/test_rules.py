"""Test the rules about sizes: which are refused, with which numbers, and that the named remedy works."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

# Sizes that pass: 2 * 4 prompts per rollout step, 2 * 2 per optimizer step.
VALID = "-t 2 -i 2 -ibs 4 -imbs 2 -tbs 2 -tMbs 2 -tmbs 2 -g 4"


def check_argv(text):
    check(parse(text.split())[0])


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        check_argv(text)
    return str(caught.value)


def test_the_defaults_pass():
    for text in ("", VALID):
        assert check_argv(text) is None


@pytest.mark.parametrize(
    ("change", "rule", "nearest"),
    [
        (
            "-ibs 3 -imbs 1",
            "(P * ibs) % (tbs * dp) must be 0: 2 * 3 = 6 prompts per rollout step are no multiple of 2 * 2 = 4",
            "-tbs 3 -tMbs 3 or -ibs 4",
        ),
        ("-imbs 3", "ibs % imbs must be 0, and 4 % 3 = 1", "-imbs 4"),
        ("-imbs 9", "ibs % imbs must be 0, and -imbs 9 exceeds -ibs 4", "-imbs 4"),
        ("-tbs 4 -tMbs 3", "tbs % tMbs must be 0, and 4 % 3 = 1", "-tMbs 4"),
        ("-tMbs 8", "tbs % tMbs must be 0, and -tMbs 8 exceeds -tbs 2", "-tMbs 2"),
        (
            "-tMbs 1 -tmbs 5",
            "tMbs * g must be at least tmbs: 1 * 4 = 4 samples do not fill a micro-batch of 5",
            "-tmbs 4",
        ),
        ("-g 1", "-g 1: GRPO compares the samples of a prompt", "-g 2"),
        ("-t 3 -tp 2", "T % (tp * pp) must be 0: -t 3 is no multiple of 2", "-t 4"),
        ("-t 5 -tp 2 --context-parallel 2", "T % (tp * pp * cp) must be 0: -t 5 is no multiple of 4", "-t 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_rule_numbers_and_the_nearest_flags(change, rule, nearest):
    message = refusal(f"{VALID} {change}")
    assert rule in message
    assert f"nearest valid flags: {nearest}" in message


def test_the_references_own_example_for_eight_gpus_is_explained():
    example = "-t 4 -i 4 -ibs 1 -tbs 2 -tMbs 8 -tmbs 2 -imbs 1 -g 4 -rt boxed"
    message = refusal(example)
    assert "-tMbs 8 exceeds -tbs 2 (-tbs counts the prompts that -tMbs cuts up)" in message
    assert "4 * 1 = 4 prompts per rollout step are no multiple of 2 * 4 = 8 per optimizer step" in message
    assert message.splitlines()[-1] == "nearest valid flags: -tbs 1 -tMbs 1 or -ibs 2 -tMbs 2"
    check_argv(f"{example} -tbs 1 -tMbs 1")
    check_argv(f"{example} -ibs 2 -tMbs 2")


SIZES = st.fixed_dictionaries(
    {
        "-t": st.integers(1, 16),
        "-i": st.integers(1, 16),
        "-ibs": st.integers(1, 100),
        "-imbs": st.integers(1, 100),
        "-tbs": st.integers(1, 100),
        "-tMbs": st.integers(1, 100),
        "-tmbs": st.integers(1, 100),
        "-g": st.integers(1, 16),
    }
)


@pytest.mark.full
@settings(deadline=None)
@given(SIZES)
def test_the_nearest_flags_of_any_refusal_pass_all_rules(sizes):
    argv = " ".join(f"{flag} {size}" for flag, size in sizes.items())
    try:
        check_argv(argv)
    except ConfigError as error:
        choices = str(error).splitlines()[-1].removeprefix("nearest valid flags: ").split(" or ")
        assert all(re.fullmatch(r"-\w+ \d+( -\w+ \d+)*", choice) for choice in choices)
        for choice in choices:
            check_argv(f"{argv} {choice}")


def test_sizes_beyond_counting_are_refused_at_once():
    message = refusal(f"{VALID} -ibs 1000000007 -imbs 123456 -tbs 999999937 -tMbs 7")
    assert "nearest valid flags" in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("-a SFT", "--algo 'SFT': unknown; use CISPO, CLIP_COV, DAPO, "),
        ("--advantage-estimator vtrace", "--advantage-estimator 'vtrace': unknown; use group_norm, group_mean, "),
        ("--policy-loss ppo", "--policy-loss 'ppo': unknown; use clip, cispo, sapo, gmpo, vespo, or FILE.py:FUNCTION"),
        (
            "-rt tags",
            "--reward-type 'tags': unknown reward 'tags'; use think_answer_tags, boxed, code, reasoning_gym, FILE.py:",
        ),
    ],
)
def test_what_this_version_cannot_do_is_refused_by_name(argv, message):
    assert message in refusal(argv)


@pytest.mark.parametrize(
    ("argv", "rule", "remedies"),
    [
        (
            "-zero 2 -pp 2",
            "-zero 2 with -pp 2: stage 2 hands a gradient out as soon as it is made, and a pipeline makes it in",
            ["-zero 1", "-pp 1"],
        ),
        (
            "--plugin fsdp2 -tp 2 -zero 1",
            "--plugin fsdp2 with -zero 1: it shards weights, gradients and optimizer states over trainers, and has",
            ["-zero 0", "--plugin hybrid"],
        ),
        (
            "-t 4 --expert-parallel 2",
            "--expert-parallel 2 with --plugin hybrid: tokens are exchanged between trainers",
            ["--plugin fsdp2", "--expert-parallel 1"],
        ),
        (
            "-t 4 --plugin fsdp2 -tp 2 --expert-parallel 2",
            "--expert-parallel 2 with -tp 2: both share experts out",
            ["-tp 1", "--expert-parallel 1"],
        ),
        (
            "-t 4 --plugin fsdp2 --fsdp-size 2 --expert-parallel 4",
            "--expert-parallel 4: must divide the 2 trainers that share a copy of the weights",
            ["--expert-parallel 2"],
        ),
        (
            "-t 8 -tp 2 --fsdp-size 2",
            "--fsdp-size 2 with --plugin hybrid",
            ["--plugin fsdp2", "--fsdp-size 0"],
        ),
        (
            "-t 8 -tp 2 --plugin fsdp2 --fsdp-size 3",
            "--fsdp-size 3: must divide the 4 data-parallel trainers (T / tp)",
            ["--fsdp-size 2", "--fsdp-size 4"],
        ),
        (
            "--plugin fsdp2 -pp 2",
            "--plugin fsdp2 with -pp 2: it shards weights, gradients and optimizer states over trainers, and has",
            ["-pp 1", "--plugin hybrid"],
        ),
        (
            "-zero 1 --precision fp32",
            "-zero 1 with --precision fp32: ZeRO keeps float32 masters of bfloat16 weights",
            ["--precision bf16", "-zero 0"],
        ),
        (
            "--max-tokens-per-microbatch 700 -mpt 512 -mnt 256",
            "--max-tokens-per-microbatch 700: a single sample may have -mpt 512 + -mnt 256 = 768 tokens",
            ["--max-tokens-per-microbatch 768", "-mnt 188"],
        ),
        (
            "--max-tokens-per-microbatch 500 -mpt 512 -mnt 256",
            "--max-tokens-per-microbatch 500: a single sample may have -mpt 512 + -mnt 256 = 768 tokens",
            ["--max-tokens-per-microbatch 768", "-mpt 250 -mnt 250"],
        ),
        (
            "--max-tokens-per-microbatch 700 -mpt 512 -mnt 9999 --max-episode-tokens 768",
            "--max-tokens-per-microbatch 700: a single sample may have --max-episode-tokens 768 tokens",
            ["--max-tokens-per-microbatch 768", "--max-episode-tokens 700"],
        ),
        (
            "--max-tokens-per-microbatch 500 -mpt 512 --max-episode-tokens 768",
            "--max-tokens-per-microbatch 500: a single sample may have --max-episode-tokens 768 tokens",
            ["--max-tokens-per-microbatch 768", "--max-episode-tokens 500 -mpt 250"],
        ),
    ],
)
def test_memory_settings_that_exclude_each_other_are_refused_with_remedies_that_pass(argv, rule, remedies):
    message = refusal(f"{VALID} {argv}")
    assert message.startswith(rule)
    assert message.endswith(f"; use {' or '.join(remedies)}")
    for remedy in remedies:
        check_argv(f"{VALID} {argv} {remedy}")


def test_an_episode_has_room_after_the_longest_prompt():
    message = refusal(f"{VALID} -mpt 512 -mnt 100 --max-episode-tokens 512")
    assert message == (
        "--max-episode-tokens 512: leaves no token to be sampled after a prompt of -mpt 512; "
        "use --max-episode-tokens 612, which is mpt + mnt, or a smaller -mpt"
    )
    for remedy in ("--max-episode-tokens 612", "-mpt 511"):
        check_argv(f"{VALID} -mpt 512 -mnt 100 --max-episode-tokens 512 {remedy}")


@pytest.mark.parametrize(
    ("flags", "longest", "response"),
    [
        ("", 612, 100),
        ("--tools calculator --max-episode-tokens 700", 700, 188),
        ("--tools calculator --max-episode-tokens 600", 600, 88),
        ("--max-episode-tokens 700", 612, 100),  # an episode of one answer has no more than -mnt
        ("--max-episode-tokens 600", 600, 88),
    ],
)
def test_the_longest_episode_is_the_prompt_and_one_response_unless_it_is_given(flags, longest, response):
    config = parse(f"-a DAPO -mpt 512 -mnt 100 {flags}".split())[0]
    assert (config.max_model_len, config.max_response_tokens) == (longest, response)
    assert config.over_length_cache == response // 4


@pytest.mark.parametrize(
    "argv",
    [
        "-tp 2",
        "-pp 2",
        "-zero 1",
        "-zero 2 -tp 2",
        "-zero 1 -pp 2",
        "-t 1 -zero 1",
        "-zero 1 --precision bf16",
        "--plugin fsdp2",
        "--plugin fsdp2 --precision fp32",
        "-cp dir",
    ],
)
def test_layouts_that_only_the_model_can_refuse_pass(argv):
    assert check_argv(f"{VALID} {argv}") is None


def test_all_broken_rules_are_told_at_once():
    message = refusal(f"{VALID} -imbs 3 -tMbs 8 -a RLOO -g 1 -tmbs 1 --clip-dual 1.1")
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "--clip-dual 1.1 must be above 1 + --clip-eps-high = 1.2",
        "-g 1",
        "ibs % imbs must be 0, and 4 % 3 = 1 (-ibs counts the prompts that -imbs cuts up)",
        "tbs % tMbs must be 0, and -tMbs 8 exceeds -tbs 2 (-tbs counts the prompts that -tMbs cuts up)",
        "nearest valid flags",
    ]
