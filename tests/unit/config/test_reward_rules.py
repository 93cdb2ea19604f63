"""Test rules of rewards and their limits: refusals, warnings, and the settings of a scoring process."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.reward import reward_spec
from coati_rl.config.reward_rules import reward_warnings
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardSpec

SERVICE = "-rt code -cv http://host:8000"


def config_of(text):
    return parse(text.split())[0]


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        check(config_of(text))
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "-rt code",
        "-rt boxed=1,/mine.py:score=0.2",
        "-rt code=1,/mine.py:score=0.2,http://rm:8000/score=0.5",
        "-rt http://rm:8000/score",
        SERVICE,
        f"{SERVICE} --reward-timeout-s 1",  # the service has a time limit of its own for tests
        "-rt code --test-timeout-s 59",
        "-rt boxed --test-timeout-s 100",
    ],
)
def test_rewards_that_can_be_computed_pass(text):
    assert check(config_of(text)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-rt tags", "--reward-type 'tags': unknown reward 'tags'"),
        (
            "-rt boxed=1,code=1",
            "--reward-type boxed=1,code=1: code is scored by a row's test_cases, boxed by its gt_answer, "
            "and a response has one ground truth; use one of them, or a task for each (--tasks)",
        ),
        (
            "-cv http://host:8000",
            "--code-verifier-api-url with --reward-type think_answer_tags: serves code alone; use -rt code",
        ),
        ("-rt code=1,/a.py:f=1 -cv http://host", "--code-verifier-api-url with --reward-type code=1,/a.py:f=1: serves"),
        ("-rt code -cv host:8000", "--code-verifier-api-url host:8000: is no address of a service; use http://HOST:"),
        ("-rt code -cv http://", "--code-verifier-api-url http://: is no address of a service"),
        ("-rt code -cv http://[::1", "--code-verifier-api-url http://[::1: is no address of a service"),
        (
            "-rt code --test-timeout-s 60",
            "--test-timeout-s 60 must be below --reward-timeout-s 60, which all tests of a response share; "
            "use --reward-timeout-s 360",
        ),
        ("-rt code --reward-timeout-s 5", "--test-timeout-s 10 must be below --reward-timeout-s 5"),
        ("-rt boxed --reward-combine sum", "--reward-combine 'sum': unknown; use FILE.py:FUNCTION"),
        ("-rt code -cv http://host:1 --reward-combine /a.py:f", "--code-verifier-api-url with --reward-combine: the"),
        ("-rt boxed --reward-clip 1,1", "--reward-clip 1,1: must be two numbers in order, like -10,10"),
    ],
)
def test_rewards_that_contradict_themselves_are_refused(text, message):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--env /w.py:W --reward-normalize", "--env with --reward-normalize: "),
        ("--agent-command agent --reward-clip=-1,1", "--agent-command with --reward-clip -1,1: "),
        ("--env /w.py:W --reward-normalize --reward-clip=-1,1", "--env with --reward-normalize and --reward-clip -1,1"),
    ],
)
def test_a_critic_learns_from_the_rewards_of_turns_as_they_are_given(text, named):
    message = refusal(f"-a PPO {text}")
    assert message.startswith(f"--advantage-estimator gae and {named}")
    assert message.endswith("leave it out, or use another estimator")
    assert check(config_of(text)) is None


@pytest.mark.parametrize("text", ["--env /w.py:W", "--reward-normalize", "--tools calculator --reward-clip=-1,1"])
def test_a_critic_has_one_of_both(text):
    assert check(config_of(f"-a PPO {text}")) is None


def test_the_way_out_of_too_short_a_time_passes():
    assert check(config_of("-rt code --test-timeout-s 60 --reward-timeout-s 360")) is None


@pytest.mark.parametrize("flag", ["--reward-workers 0", "--reward-timeout-s 0", "--test-timeout-s 0"])
def test_sizes_that_are_not_positive_are_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag.split()[0]} '0': Input should be greater than"):
        config_of(flag)


def test_a_program_needs_memory_for_its_interpreter():
    with pytest.raises(ConfigError, match="--test-memory-mb '31': Input should be greater than or equal to 32"):
        config_of("--test-memory-mb 31")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("-rt boxed --test-timeout-s 3", "--test-timeout-s: only --reward-type code runs programs; without it this"),
        (
            "--test-memory-mb 64 --run-model-code-without-sandbox",
            "--test-memory-mb, --run-model-code-without-sandbox: only --reward-type code runs programs",
        ),
        (
            "-rt code --math-answer any",
            "--math-answer any: only think_answer_tags and boxed compare answers; no effect",
        ),
        (f"{SERVICE} --test-timeout-s 3", "--test-timeout-s: with --code-verifier-api-url the service's own settings"),
        (
            "-rt boxed --reward-devices 2",
            "--reward-devices 2: only -rt model:DIRECTORY has devices; this has no effect",
        ),
        (f"{SERVICE} --reward-workers 4", "--reward-workers 4: with --code-verifier-api-url nothing is scored here"),
        (
            "-rt code --run-model-code-without-sandbox",
            "--run-model-code-without-sandbox: programs that the model writes run with your rights: they can read, "
            "change and delete your files, use your keys and your network; leave it out to run them in the sandbox",
        ),
    ],
)
def test_settings_without_effect_and_risks_are_warned_about(text, warning):
    (found,) = reward_warnings(config_of(text))
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "text", ["", "-rt boxed --math-answer any", "-rt code", "-rt code --test-timeout-s 3 --reward-workers 4", SERVICE]
)
def test_usual_settings_are_not_warned_about(text):
    assert list(reward_warnings(config_of(text))) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 5.0),
        ("-rt http://rm/score", 60.0),
        ("-rt code", 60.0),
        ("-rt /a.py:f=1,code=2", 60.0),
        ("-rt code --reward-timeout-s 20", 20.0),
        ("--reward-timeout-s 20", 20.0),
    ],
)
def test_a_response_has_5_seconds_with_code_or_a_url_60_or_what_is_given(text, seconds):
    assert config_of(text).reward.response_timeout_s == seconds


def test_a_scoring_process_gets_to_know_the_reward_and_its_limits():
    assert reward_spec(config_of("").reward) == RewardSpec(reward_type="think_answer_tags")
    flags = "-rt code=2 --reward-timeout-s 30 --test-timeout-s 3 --test-memory-mb 64 --run-model-code-without-sandbox"
    assert reward_spec(config_of(flags).reward) == RewardSpec(
        reward_type="code=2", timeout_s=30.0, test_timeout_s=3.0, test_memory_mb=64, is_sandboxed=False
    )


def test_the_path_of_a_function_is_absolute_in_the_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert config_of("-rt boxed=1,mine.py:score=0.2").reward.reward_type == f"boxed=1,{tmp_path}/mine.py:score=0.2"


def test_the_home_of_nobody_is_refused():
    with pytest.raises(ConfigError, match=r"--reward-type '~nobody_here/mine.py:score'"):
        config_of("-rt ~nobody_here/mine.py:score")
