"""Test that contradicting parts of an algorithm are refused with a remedy, and unlikely ones warned about."""

import pytest

from coati_rl.config.algorithm_rules import algorithm_problems, algorithm_warnings, needs_group
from coati_rl.config.cli import parse
from coati_rl.config.presets import PRESETS
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


def config_of(text):
    return parse(text.split())[0]


def problems(text):
    return [*algorithm_problems(config_of(text))]


def warnings(text):
    return [*algorithm_warnings(config_of(text))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algo", PRESETS)
def test_presets_have_neither_problems_nor_warnings(algo):
    assert problems(f"-a {algo}") == []
    assert warnings(f"-a {algo}") == []


# What is given; how the one problem begins; what repairs it, each of which passes when it is added.
REFUSALS = [
    (
        "-kl 0 --kl-place loss",
        "--kl-place loss with --kl-coeff 0: has no effect; give a -kl above 0, or --kl-place none",
        ["-kl 0.1", "--kl-place none"],
    ),
    ("-a DAPO --kl-place reward", "--kl-place reward with --kl-coeff 0", ["-kl 0.1", "--kl-place none"]),
    (
        "--kl-place none",
        "--kl-coeff 0.01 with --kl-place none: give --kl-place loss or reward, or -kl 0",
        ["--kl-place loss", "--kl-place reward", "-kl 0"],
    ),
    (
        "--clip-eps-high 0.5 --clip-dual 1.5",
        "--clip-dual 1.5 must be above 1 + --clip-eps-high = 1.5",
        ["--clip-dual 3", "--clip-eps-high 0.2"],
    ),
    ("--clip-dual 1.1", "--clip-dual 1.1 must be above 1 + --clip-eps-high = 1.2", ["--clip-dual 3"]),
    (
        "--off-policy-correction icepop --off-policy-low 3 --off-policy-high 2",
        "--off-policy-low 3.0 must be below --off-policy-high 2.0",
        ["--off-policy-low 0.5"],
    ),
    (
        "--off-policy-correction icepop --off-policy-low 1.5",
        "--off-policy-low 1.5, --off-policy-high 5.0: must enclose 1, the ratio of equal policies",
        ["--off-policy-low 0.5"],
    ),
    (
        "--off-policy-correction tis --off-policy-high 0.9",
        "--off-policy-low 0.0, --off-policy-high 0.9: must enclose 1",
        ["--off-policy-high 2"],
    ),
    (
        "--filter-range 0.9,0.1",
        "--filter-range 0.9,0.1: mean scores lie in [0, 1]; give two of them in order, like 0,1",
        ["--filter-range 0,1", "--filter-range None"],
    ),
    ("--filter-range 0.5,0.5", "--filter-range 0.5,0.5: mean scores lie in [0, 1]", ["--filter-range 0,1"]),
    ("--filter-range=-0.1,0.9", "--filter-range -0.1,0.9: mean scores lie in [0, 1]", ["--filter-range 0,0.9"]),
    ("--filter-range 0.1,1.5", "--filter-range 0.1,1.5: mean scores lie in [0, 1]", ["--filter-range 0.1,1"]),
    (
        "-g 2 --filter-range 0.6,0.7",
        "--filter-range 0.6,0.7 with -g 2: no group has such a mean score, as they are multiples of 1/2",
        ["-g 3", "--filter-range 0.4,0.7", "-rt /mine.py:graded", "-rt http://rm/score=1,boxed=1"],
    ),
    (
        "-a REINFORCE_PP -g 1 --filter-range 0.01,0.99",
        "--filter-range 0.01,0.99 with -g 1: no group has such a mean score",
        ["-g 2", "--filter-range None"],
    ),
    (
        "-a DAPO -mpt 100 -mnt 64 --max-episode-tokens 140 --cache-length 41",
        "--cache-length 41 exceeds max-episode-tokens - mpt = 40; give less",
        ["--cache-length 40", "--max-episode-tokens 141"],
    ),
    (
        "-a DAPO -mnt 64 --cache-length 65",
        "--cache-length 65 exceeds --max-new-tokens 64; give less",
        ["--cache-length 64", "-mnt 65"],
    ),
]


@pytest.mark.parametrize(("argv", "message", "remedies"), REFUSALS, ids=[argv for argv, _, _ in REFUSALS])
def test_a_contradiction_is_refused_with_remedies_that_pass(argv, message, remedies):
    (found,) = problems(argv)
    assert found.startswith(message)
    with pytest.raises(ConfigError) as caught:
        check(config_of(argv))
    assert str(caught.value).splitlines()[0] == found
    for remedy in remedies:
        assert problems(f"{argv} {remedy}") == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--clip-eps-low 1.5", "--clip-eps-low '1.5'"),
        ("--clip-eps-high -0.1", "--clip-eps-high '-0.1'"),
        ("--clip-dual 1", "--clip-dual '1'"),
        ("--skip-threshold 1", "--skip-threshold '1'"),
        ("--entropy-coeff -1", "--entropy-coeff '-1'"),
        ("-kl -1", "--kl-coeff '-1'"),
        ("--cache-length 0", "--cache-length '0'"),
        ("--kl-estimator k4", "--kl-estimator 'k4'"),
        ("--kl-place prompt", "--kl-place 'prompt'"),
        ("--ratio-level word", "--ratio-level 'word'"),
        ("--loss-variation batch", "--loss-variation 'batch'"),
        ("--off-policy-correction mis", "--off-policy-correction 'mis'"),
        ("--filter-range 0.1", "--filter-range"),
        ("--filter-range a,b", "--filter-range"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_flag(argv, message):
    with pytest.raises(ConfigError) as caught:
        config_of(argv)
    assert str(caught.value).startswith(message)


def test_all_contradictions_are_told_at_once():
    found = problems("-kl 0 --kl-place loss --clip-dual 1.1 --filter-range 1,0")
    assert [line.partition(" ")[0] for line in found] == [
        "--kl-place",
        "--clip-dual",
        "--filter-range",
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algo", [name for name in PRESETS if name not in ("REINFORCE_PP", "REMAX", "PPO")])
def test_one_sample_a_prompt_is_refused_where_samples_are_compared(algo):
    assert needs_group(config_of(f"-a {algo}"))
    with pytest.raises(ConfigError, match=f"-g 1: {algo} compares the samples of a prompt and learns nothing from one"):
        check(config_of(f"-a {algo} -g 1 -tmbs 1"))


def test_one_sample_a_prompt_will_do_where_the_batch_is_the_baseline_or_the_user_decides():
    for argv in ("-a REINFORCE_PP", "-a RLOO --advantage-estimator reward", "--advantage-estimator mine.py:advantage"):
        assert not needs_group(config_of(argv))
        check(config_of(f"{argv} -g 1 -tmbs 1"))


def test_a_sequence_ratio_with_bounds_of_a_token_ratio_is_warned_about():
    (found,) = warnings("--ratio-level sequence")
    assert found.startswith("--ratio-level sequence with --clip-eps-low 0.2 and --clip-eps-high 0.2: ")
    assert "GSPO uses 3e-4 and 4e-4" in found
    (found,) = warnings("-a GSPO --clip-eps-high 0.28")
    assert found.startswith("--ratio-level sequence with --clip-eps-high 0.28: ")
    assert warnings("-a GSPO --clip-eps-low 0.01 --clip-eps-high 0.01") == []
    assert warnings("-a CISPO --ratio-level sequence") == []


@pytest.mark.parametrize("argv", ["-topk 50", "-topp 0.9", "--min-p 0.1"])
def test_cut_sampling_is_warned_about_and_old_logprobs_are_the_trainers(argv):
    (found,) = warnings(argv)
    assert found.startswith("--top-k, --top-p, --min-p: engines renormalise what is left")
    assert config_of(argv).recomputes_old_logprobs


@pytest.mark.parametrize(
    ("argv", "recomputes"),
    [
        ("", False),
        ("--old-logprobs engine", False),
        ("--old-logprobs trainer", True),
        ("--off-policy-correction tis", True),
    ],
)
def test_old_logprobs_are_recomputed_where_asked_for_or_needed(argv, recomputes):
    assert config_of(argv).recomputes_old_logprobs is recomputes


def test_dynamic_batching_that_nothing_fills_is_warned_about():
    (found,) = warnings("--dynamic-batching")
    assert found.startswith("--dynamic-batching has nothing to replace")
    assert warnings("--dynamic-batching --filter-range 0.01,0.99") == []
    assert warnings("--dynamic-batching --filter-truncated-response") == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--kl-estimator k1", "--kl-estimator k1 in the loss: the expectation of its gradient is 0"),
        (
            "-rt boxed --advantage-estimator gdpo",
            "--advantage-estimator gdpo: with one reward it is group_norm; name several in -rt",
        ),
        (
            "-rt boxed=1,/a.py:f=1 --advantage-estimator gdpo",
            "--advantage-estimator gdpo without --whiten-advantages: GDPO also brings the advantages of a ",
        ),
        ("--turn-advantages 0.9", "--turn-advantages 0.9 without --env, --tools or --agent-command: has no effect"),
        ("--reward-scale 5", "--reward-scale 5 scales --soft-over-length-punishment, which is off"),
        ("--top-p 0.9 --old-logprobs engine", "--top-k, --top-p, --min-p: engines renormalise what is left"),
    ],
)
def test_what_has_no_effect_or_not_the_one_it_names_is_warned_about(argv, message):
    (found,) = warnings(argv)
    assert found.startswith(message)
    assert ("in spite of --old-logprobs engine" in found) == ("engine" in argv)
