"""Test how a producer calls the actors of a reward model, without Ray."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rewards.model.actor import RewardModelActors
from rewards.model.judgement import JudgedConversation, Judgement

ASKED = [JudgedConversation(messages=(), response="a"), JudgedConversation(messages=(), response="b")]


class Actor:
    """Keeps its calls open until they are answered."""

    def __init__(self):
        self.calls = []
        self.score = SimpleNamespace(remote=self._call)

    def _call(self, conversations):
        self.calls.append(Future())
        return SimpleNamespace(future=lambda: self.calls[-1])


@pytest.fixture
def actors():
    return [Actor(), Actor()]


def test_a_request_goes_to_the_copy_with_the_fewest(actors):
    model = RewardModelActors(actors)
    first, *_ = [model.submit(ASKED) for _ in range(3)]
    assert [len(actor.calls) for actor in actors] == [2, 1]
    actors[0].calls[0].set_result([Judgement(reward=1.0), Judgement(reward=2.0)])
    actors[0].calls[1].set_result([])
    assert [judgement.reward for judgement in first.result(timeout=0)] == [1.0, 2.0]
    model.submit(ASKED)
    assert [len(actor.calls) for actor in actors] == [3, 1], "it has none left, the other has one"


def test_a_call_that_fails_is_a_problem_of_each_response(actors):
    future = RewardModelActors(actors).submit(ASKED)
    actors[0].calls[0].set_exception(OSError("the actor died\nunexpectedly"))
    assert [judgement.problem for judgement in future.result(timeout=0)] == [
        "its process failed: OSError: the actor died unexpectedly"
    ] * 2
