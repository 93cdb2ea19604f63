"""Test that fields of rewards reach the process or the service that scores responses.

The part of a test's name before two underscores is the field (see test_flags.py). What they do there, in real processes
and with a real service, is in tests/integration/test_scorer.py.
"""

import json

import pytest

import coati_rl.sandbox
import rewards.remote.client
from coati_rl.config.cli import build_config
from coati_rl.config.rules import check
from coati_rl.preflight.placement import Request
from coati_rl.reward_spec import RewardActors
from coati_rl.types import Problem
from rewards.registry import make_reward
from rewards.remote.client import RemoteScorer
from rewards.scorer import scorer_factory
from rewards.workers.pool import RewardPool


@pytest.fixture
def factory_of(small_run):
    """Changes to the small run's fields -> what makes a producer's scorer."""

    def make(**changes):
        config = build_config({**small_run, **changes})
        check(config)
        return scorer_factory(config)

    return make


@pytest.fixture
def num_sandbox_checks(monkeypatch):
    """One more for each time that the sandbox is tried."""
    checks = []
    monkeypatch.setattr(coati_rl.sandbox, "check_sandbox", lambda: checks.append(1))
    return lambda: len(checks)


def test_code_verifier_api_url__has_a_service_score_in_the_place_of_processes(factory_of, monkeypatch):
    asked = []
    monkeypatch.setattr(rewards.remote.client, "check_service", lambda url, **options: asked.append((url, options)))
    monkeypatch.setenv("COATI_REWARD_TOKEN", "a-token-of-this-test-0123456789")
    factory = factory_of(reward_type="code", code_verifier_api_url="http://host:8765", num_generations=4)
    assert (factory.func, factory.args) == (RemoteScorer, ("http://host:8765",))
    assert factory.keywords == {
        "token": "a-token-of-this-test-0123456789",
        "reward_type": "code",
        "timeout_s": 4 * 60.0,  # a group's responses may be scored one after another
    }
    assert asked == [("http://host:8765", {"token": "a-token-of-this-test-0123456789", "reward_type": "code"})]
    assert factory_of().func is RewardPool


def test_answer_key__names_the_column_that_responses_are_scored_against(run_in_threads, tmp_path):
    (tmp_path / "mine.py").write_text("def score(messages, answer): return float(answer)\n")
    rows = [{"messages": f"p{'x' * i}", "answer": "0", "solution": 0.25} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dataset": f"{tmp_path}/data.jsonl", "reward_type": f"{tmp_path}/mine.py:score", "max_steps": 1}
    for answer_key, reward in ((None, 0.0), ("solution", 0.25)):
        (step,) = run_in_threads({**settings, "answer_key": answer_key}, score=None).steps
        assert step["reward_mean"] == reward


@pytest.mark.parametrize("number", [1, 3])
def test_reward_workers__is_the_number_of_scoring_processes(factory_of, number):
    assert factory_of(reward_workers=number).keywords["num_workers"] == number


@pytest.mark.parametrize(("given", "seconds", "elsewhere_s"), [(None, 5.0, 60.0), (7.0, 7.0, 7.0)])
def test_reward_timeout_s__is_the_time_for_a_response(factory_of, given, seconds, elsewhere_s):
    factory = factory_of(reward_timeout_s=given)
    assert factory.keywords["timeout_s"] == factory.args[0].timeout_s == seconds
    group = factory_of(reward_timeout_s=given, reward_type="http://rm:8000/score", num_generations=4)
    assert group.keywords["timeout_s"] == 4 * elsewhere_s, "all at once: the time of all"
    assert (group.args[0].timeout_s, group.args[0].group_timeout_s) == (elsewhere_s, 4 * elsewhere_s)
    several = factory_of(
        reward_timeout_s=given, reward_type="code,http://rm:8000/score", num_generations=4, test_timeout_s=5.0
    )
    assert several.keywords["timeout_s"] == 2 * 4 * several.args[0].timeout_s, "one part after the other"


@pytest.mark.parametrize(("given", "verdict"), [("number", "wrong"), ("any", "ok")])
def test_math_answer__says_what_may_answer_a_number(factory_of, given, verdict):
    spec = factory_of(reward_type="boxed", math_answer=given).args[0]
    (score,) = make_reward(spec).score([r"\boxed{27 + 45}"], Problem(ground_truth="72"))
    assert score.verdict == verdict


def test_reward_combine__makes_one_reward_of_several(factory_of, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def length(response): return len(response)\n"
        "def combine(rewards): return rewards['boxed'] * 10 - rewards['mine.length']\n"
    )
    rewards = f"boxed=1,{tmp_path}/mine.py:length=1"
    spec = factory_of(reward_type=rewards, reward_combine=f"{tmp_path}/mine.py:combine").args[0]
    (score,) = make_reward(spec).score([r"\boxed{72}"], Problem(ground_truth="72"))
    assert (score.reward, score.answer_correct) == (10 - 10, True)
    (plain,) = make_reward(factory_of(reward_type=rewards).args[0]).score([r"\boxed{72}"], Problem(ground_truth="72"))
    assert plain.reward == 1 + 10


@pytest.mark.parametrize(("number", "actors", "gpus"), [(None, 1, 1), (2, 2, 2), (0, 1, 0)])
def test_reward_devices__is_the_number_of_copies_of_a_reward_model(small_run, number, actors, gpus):
    changes = {} if number is None else {"reward_devices": number}
    config = build_config({**small_run, "reward_type": "boxed=1,model:/judge=0.5,model:/other=1", **changes})
    assert [len(names) for names in config.reward_models.names.values()] == [actors, actors]
    assert [*config.reward_models.names] == ["/judge", "/other"]
    names = [name for copies in config.reward_models.names.values() for name in copies]
    assert names == [f"reward-model-{number}" for number in range(2 * actors)]
    placed = Request.of(config, "cuda").actors["reward model"]
    assert (placed.number, placed.each.gpus) == (2 * actors, 1 if gpus else 0)
    without = build_config(small_run)
    assert config.num_devices - without.num_devices == 2 * gpus
    assert (Request.of(config, "cpu").actors["reward model"].each.gpus, without.reward_models) == (0, RewardActors())


@pytest.mark.parametrize("seconds", [10.0, 3.0])
def test_test_timeout_s__limits_a_program(factory_of, num_sandbox_checks, seconds):
    assert factory_of(reward_type="code", test_timeout_s=seconds).args[0].test_timeout_s == seconds


@pytest.mark.parametrize("size", [1024, 64])
def test_test_memory_mb__limits_a_program(factory_of, num_sandbox_checks, size):
    assert factory_of(reward_type="code", test_memory_mb=size).args[0].test_memory_mb == size


def test_run_model_code_without_sandbox__does_without_it(factory_of, num_sandbox_checks):
    assert factory_of(reward_type="code").args[0].is_sandboxed is True
    assert num_sandbox_checks() == 1
    assert factory_of(reward_type="code", run_model_code_without_sandbox=True).args[0].is_sandboxed is False
    assert num_sandbox_checks() == 1, "nobody needs one"
