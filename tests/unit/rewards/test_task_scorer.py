"""The scorer of several tasks: who scores what, who shares, and what is made when."""

import pickle
from concurrent.futures import Future

import pytest

from coati_rl.config.cli import build_config
from coati_rl.config.rules import check
from coati_rl.errors import RunError
from coati_rl.types import Problem
from rewards.remote import client
from rewards.remote.client import RemoteScorer
from rewards.scorer import scorer_factory
from rewards.task_scorer import TaskScorer
from rewards.workers.pool import RewardPool

SIZES = {"num_trainers": 1, "num_inferencer": 1, "num_generations": 4}


class Scorer:
    """Notes what it is asked for."""

    def __init__(self, name, made):
        made.append(name)
        self.name, self.is_closed = name, False

    def submit(self, responses, problem):
        future = Future()
        future.set_result([self.name] * len(responses))
        return future

    def close(self):
        self.is_closed = True


def scores(scorer, task):
    return scorer.submit(["a", "b"], Problem(ground_truth="", task=task)).result()


def test_each_task_has_its_reward_and_the_runs_own_is_made_when_it_is_needed():
    made = []
    factories = {name: lambda name=name: Scorer(name, made) for name in ("default", "math", "code")}
    scorer = TaskScorer({**factories, "more math": factories["math"]})
    assert made == ["math", "code"], "one for tasks of the same reward"
    assert scores(scorer, "code") == ["code", "code"]
    assert scores(scorer, "more math") == scores(scorer, "math") == ["math", "math"]
    assert scores(scorer, "default") == ["default", "default"]
    assert made == ["math", "code", "default"]


def test_it_closes_all_and_makes_none_afterwards():
    made = []
    scorers = []

    def factory():
        scorers.append(Scorer("math", made))
        return scorers[-1]

    scorer = TaskScorer({"default": factory, "math": lambda: factory()})
    scorer.close()
    assert [each.is_closed for each in scorers] == [True]
    with pytest.raises(RunError, match="closed"):
        scores(scorer, "default")


def test_a_scorer_that_cannot_be_made_leaves_none_behind():
    made, scorers = [], []

    def fine():
        scorers.append(Scorer("math", made))
        return scorers[-1]

    def broken():
        raise RunError("no process")

    with pytest.raises(RunError, match="no process"):
        TaskScorer({"math": fine, "code": broken})
    assert [each.is_closed for each in scorers] == [True]


@pytest.fixture
def factories_of(monkeypatch):
    monkeypatch.setattr("coati_rl.sandbox.check_sandbox", lambda: None)

    def make(tasks, **changes):
        config = build_config({**SIZES, "tasks": tasks, **changes})
        check(config)
        factory = pickle.loads(pickle.dumps(scorer_factory(config)))
        assert factory.func is TaskScorer
        return factory.args[0]

    return make


def test_tasks_of_the_same_reward_share_processes_and_others_have_their_own_limits(factories_of, tmp_path):
    (tmp_path / "own.py").write_text("def score(response): return 1.0\n")
    own = f"{tmp_path}/own.py:score"
    factories = factories_of(
        {
            "easy": {"reward_type": "boxed", "temperature": 0.5},
            "hard": {"reward_type": "boxed"},
            "code": {"reward_type": "code"},
            "style": {"reward_type": own, "correct_from": 0.5},
        }
    )
    assert factories["easy"] is factories["hard"] is not factories["code"]
    assert {name: factory.keywords["timeout_s"] for name, factory in factories.items()} == {
        "default": 5.0,
        "easy": 5.0,
        "hard": 5.0,
        "code": 60.0,
        "style": 60.0,
    }
    assert (factories["style"].args[0].correct_from, factories["easy"].args[0].correct_from) == (0.5, 1.0)


def test_a_service_scores_the_tasks_of_code_and_processes_the_others(factories_of, monkeypatch):
    monkeypatch.setattr(client, "check_service", lambda url, **options: None)
    monkeypatch.setenv("COATI_REWARD_TOKEN", "a-token-of-this-test-0123456789")
    tasks = {"math": {"reward_type": "boxed"}, "code": {"reward_type": "code"}}
    factories = factories_of(tasks, code_verifier_api_url="http://host:8765")
    assert {name: factory.func for name, factory in factories.items()} == {
        "default": RewardPool,
        "math": RewardPool,
        "code": RemoteScorer,
    }
