"""Test that concurrent requests are scored together, and that each gets its own judgements."""

import threading

import pytest

import rewards.model.request_batcher as module
from rewards.model.judgement import JudgedConversation, Judgement
from rewards.model.request_batcher import LocalModel, RequestBatcher


class Lengths:
    """A model that judges a response by its length, and waits before its first batch."""

    def __init__(self):
        self.batches, self.may_score, self.has_begun = [], threading.Event(), threading.Event()

    def score(self, conversations):
        self.batches.append([each.response for each in conversations])
        self.has_begun.set()
        assert self.may_score.wait(30)
        if any(each.response == "fail" for each in conversations):
            raise RuntimeError("out of memory")
        return [Judgement(reward=float(len(each.response))) for each in conversations]


def asked(*responses):
    return [JudgedConversation(messages=(), response=response) for response in responses]


@pytest.fixture
def model():
    return Lengths()


@pytest.fixture
def client(model):
    client = LocalModel(lambda: model)
    yield client
    model.may_score.set()
    client.close()


def rewards_of(future):
    return [judgement.reward for judgement in future.result(timeout=30)]


def test_what_arrives_while_a_batch_is_scored_is_the_next_batch(model, client):
    first = client.submit(asked("a"))
    assert model.has_begun.wait(30)
    second, third = client.submit(asked("bb", "ccc")), client.submit(asked("dddd"))
    model.may_score.set()
    assert [rewards_of(future) for future in (first, second, third)] == [[1.0], [2.0, 3.0], [4.0]]
    assert model.batches == [["a"], ["bb", "ccc", "dddd"]]


def test_a_batch_is_bounded_and_a_larger_request_is_a_batch_of_its_own(model, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 2)
    futures = [client.submit(asked("a"))]
    assert model.has_begun.wait(30)
    futures += [client.submit(asked("b")), client.submit(asked("c")), client.submit(asked("d", "e", "f"))]
    model.may_score.set()
    assert [len(rewards_of(future)) for future in futures] == [1, 1, 1, 3]
    assert model.batches == [["a"], ["b", "c"], ["d", "e", "f"]]


def test_a_batch_that_fails_has_problems_and_the_next_one_is_scored(model, client):
    model.may_score.set()
    (failed,) = client.submit(asked("fail")).result(timeout=30)
    assert failed == Judgement(problem="RuntimeError: out of memory")
    assert rewards_of(client.submit(asked("a"))) == [1.0]


def test_closing_answers_the_requests_that_wait(model):
    batcher = RequestBatcher(lambda: model)
    waiting = batcher.submit(asked("a", "b"))
    batcher.close()
    batcher.run()  # returns at once
    assert [each.problem for each in waiting.result(timeout=0)] == ["it was stopped before"] * 2
    assert batcher.submit(asked("c")).result(timeout=0) == [Judgement(problem="it was stopped before")]
