"""Test the settings of episodes of several turns: what is refused, what is warned about, what the plan says."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.environment_rules import environment_warnings
from coati_rl.config.plan import make_plan
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from producer.made_environment import check_environment

FILE = """
class World:
    def __init__(self, size, *, mood="calm"):
        self.made = [size, mood]
    def reset(self, task): ...
    def step(self, action): ...

class Silent:
    def reset(self, task): ...

def make(size=3):
    return World(size)
"""


def config_of(text):
    return parse(text.split())[0]


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        check(config_of(text))
    return str(caught.value)


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "world.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-rt env", "--reward-type env: there is no environment to give rewards; give --env FILE.py:CLASS of"),
        ("--env world", "--env 'world': is no environment; write FILE.py:CLASS"),
        ("--env w.py:W -rt env,boxed", "the rewards of an environment are added to those of -rt as they are"),
        ("--env w.py:W -rt env=2", "the rewards of an environment are added to those of -rt as they are"),
        (
            "--env w.py:W --reward-combine c.py:c",
            "--reward-combine with --reward-type env: rewards of turns are summed",
        ),
        ("--env w.py:W --stale-episodes cut", "--stale-episodes cut with --n-behind 0: has no effect"),
        (
            "--env textarena:A --input-template {}",
            "--input-template with --env textarena:A: its turns are messages, which",
        ),
        ("--env w.py:W --env-arg size", "--env-arg ['size']: 'size' is no argument; write NAME=VALUE"),
        ("--env w.py:W --env-arg a=1 --env-arg a=2", "a is given twice; give it once"),
        ("--env w.py:W --env-timeout 0", "--env-timeout '0': Input should be greater than 0"),
        ("--env w.py:W --max-turns 0", "--max-turns '0': Input should be greater than or equal to 1"),
        ("--env w.py:W --env-isolation fork", "--env-isolation 'fork': Input should be 'thread' or 'process'"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_remedy(text, message):
    assert message in refusal(text)


def test_an_environment_gives_the_rewards_unless_others_are_named():
    assert config_of("--env w.py:W").reward.reward_type == "env"
    assert config_of("--env w.py:W -rt boxed").reward.reward_type == "boxed"
    assert config_of("").reward.reward_type == "think_answer_tags"


def test_values_of_arguments_are_json_or_text():
    texts = ["n=3", "x=0.5", "on=true", "name=tiny", 'of=[1, "a"]', "at=a=b", "empty="]
    config, _ = parse(["--env", "w.py:W", *(word for text in texts for word in ("--env-arg", text))])
    assert config.environment.arguments == {
        "n": 3, "x": 0.5, "on": True, "name": "tiny", "of": [1, "a"], "at": "a=b", "empty": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("World", "", "is given nothing, and does not take these: missing a required argument: 'size'"),
        ("World", "--env-arg size=1 --env-arg depth=2", "got an unexpected keyword argument 'depth'"),
        ("Silent", "", "the class needs the methods reset(task) and step(action)"),
        ("Nobody", "", "has no function 'Nobody'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_before_anything_starts(world, name, arguments, message):
    with pytest.raises(ConfigError) as caught:
        check_environment(config_of(f"--env {world}:{name} {arguments}"))
    assert message in str(caught.value)


@pytest.mark.parametrize("which", ["World --env-arg size=1 --env-arg mood=wild", "make", "make --env-arg size=4"])
def test_a_class_or_a_function_with_its_arguments_is_taken(world, which):
    assert check_environment(config_of(f"--env {world}:{which}")).tools == ()


def test_the_plan_names_the_environment_and_its_limits():
    config = config_of("--env /w.py:W --env-arg n=3 --max-turns 5 --env-timeout 9 -mpt 100 --max-episode-tokens 900")
    (line,) = [line for line in make_plan(config, num_prompts=64, device="cpu").lines() if "environment" in line]
    assert line.split(maxsplit=1)[1] == ("/w.py:W n=3 (in a thread; at most 5 turns, 900 tokens, 9 s for a call)")
    plain = make_plan(config_of(""), num_prompts=64, device="cpu").lines()
    assert not any(line.startswith("environment") for line in plain)


def test_what_is_hardly_meant_is_warned_about():
    (warning,) = environment_warnings(config_of("--env w.py:W -mpt 100 -mnt 50"))
    assert "the turns of an episode share mpt + mnt = 150 tokens" in warning
    long = "--env w.py:W --max-episode-tokens 900 --max-turns 100 --env-timeout 60"
    (warning,) = environment_warnings(config_of(long))
    assert "= 6000 s exceed --stall-timeout-s 1800" in warning
    assert [*environment_warnings(config_of(f"{long} --inflight-update"))] == []
    assert [*environment_warnings(config_of(""))] == []
