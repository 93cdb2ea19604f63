"""Test the settings of a distillation: refusals with their remedies, warnings, and what the plan says."""

from pathlib import Path

import pytest

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.distillation_rules import distillation_problems, distillation_warnings
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from consumer.jobs.offline import models, objective_of
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.objectives.forward_kl import ForwardKL

ALONE = "--teacher big --distill-only"


def problems(text):
    return [*distillation_problems(parse(text.split())[0])]


def warnings(text):
    return [*distillation_warnings(parse(text.split())[0])]


@pytest.mark.parametrize(
    ("text", "message", "remedies"),
    [
        ("-rt none", "--reward-type none: nothing is learned from rewards that are all 0", [ALONE, "-rt boxed"]),
        ("-rt none --teacher big", "--reward-type none: nothing is learned", ["--distill-only", "-rt boxed"]),
        (f"{ALONE} -rt none -ed test=e.jsonl", "--eval-dataset with --reward-type none", ["-rt boxed", "-ed None"]),
    ],
)
def test_what_teaches_nothing_is_refused_with_remedies_that_pass(text, message, remedies):
    (problem,) = problems(text)
    assert problem.startswith(message)
    for remedy in remedies:
        assert problems(f"{text} {remedy}") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--distill-coeff 0", "--distill-coeff '0': Input should be greater than 0"),
        ("--distill-kl half", "--distill-kl 'half': Input should be 'token' or 'full'"),
    ],
)
def test_values_out_of_range_are_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--teacher", "big", *text.split()])


def test_no_reward_is_named_alone():
    with pytest.raises(ConfigError, match="none adds nothing to other rewards; leave it out"):
        check(parse([*ALONE.split(), "-rt", "none,boxed"])[0])


@pytest.mark.parametrize(
    ("text", "beginning", "remedy"),
    [
        (ALONE, "--distill-only with -kl 0.01: KL to the start model holds", "-kl 0"),
        (f"{ALONE} -kl 0 --filter-range 0,1", "--distill-only with --filter-range 0,1", "--filter-range None"),
        (
            f"{ALONE} -kl 0 --soft-over-length-punishment",
            "--distill-only with --soft-over-length-punishment: has no effect",
            "--no-soft-over-length-punishment",
        ),
    ],
)
def test_what_works_against_the_teacher_is_warned_about(text, beginning, remedy):
    (warning,) = warnings(text)
    assert warning.startswith(beginning)
    assert warnings(f"{text} {remedy}") == []
    assert warnings(text.replace("--distill-only", "")) == []


def test_one_sample_a_prompt_is_enough_where_no_reward_is_compared():
    check(parse(f"{ALONE} -kl 0 -g 1 -tMbs 8 -tmbs 1".split())[0])
    with pytest.raises(ConfigError, match="-g 1"):
        check(parse(["--teacher", "big", "-g", "1", "-tMbs", "8", "-tmbs", "1"])[0])


def sft(text):
    config, _ = parse_job(text.split(), SftJobConfig)
    check_offline(config)
    return config


def test_supervised_fine_tuning_says_what_it_trains_on():
    assert sft("").objective_text == "cross-entropy of the assistant's tokens"
    assert sft("--teacher big").objective_text == "1 x forward KL to the teacher of the assistant's tokens"
    mixed = "0.75 x forward KL to the teacher + 0.25 x cross-entropy of the assistant's tokens"
    assert sft("--teacher big --distill-weight 0.75").objective_text == mixed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--distill-weight 0.5", "--distill-weight 0.5 without --teacher: has no effect"),
        ("--teacher big --distill-weight 0", "--distill-weight '0': Input should be greater than 0"),
        ("--teacher big --distill-weight 1.5", "--distill-weight '1.5': Input should be less than or equal to 1"),
    ],
)
def test_a_share_of_the_teacher_in_fine_tuning_is_above_0_and_at_most_1_and_needs_one(text, message):
    with pytest.raises(ConfigError, match=message):
        sft(text)


@pytest.mark.parametrize(
    ("flags", "objective", "teacher"),
    [("", CrossEntropy, None), ("--teacher big", ForwardKL, "big")],
)
def test_the_job_builds_the_objective_and_names_the_teacher(flags, objective, teacher):
    config = sft(flags)
    assert type(objective_of(config)) is objective
    found = models(config, Path("small"))
    assert found["policy"].directory == Path("small")
    assert {role: source.directory for role, source in found.items() if source.optimizer is None} == (
        {} if teacher is None else {"teacher": Path(teacher)}
    )
