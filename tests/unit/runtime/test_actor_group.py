"""Test what a start says of actors that load, without Ray."""

from types import SimpleNamespace

import pytest

from coati_rl.runtime import managed_actor
from coati_rl.runtime.actor_group import ActorGroup


@pytest.fixture
def loading(monkeypatch):
    """(references of trainers, of producers, of reward models) -> the text; those that begin with "done" have ended."""

    def wait(references, *, num_returns, timeout):
        done = [each for each in references if each.startswith("done")]
        return done, [each for each in references if each not in done]

    monkeypatch.setattr(managed_actor.ray, "wait", wait)

    def text(trainers, producers, reward_models=(), *, num_trainers):
        members = [[SimpleNamespace(task=each) for each in names] for names in (producers, reward_models)]
        group = SimpleNamespace(
            _config=SimpleNamespace(parallel=SimpleNamespace(num_trainers=num_trainers), num_producers=len(producers)),
            _trainer_starts=trainers,
            starting=dict(enumerate(members[0])),
            reward_models=members[1],
            scorers=[],
        )
        return ActorGroup._loading(group)

    return text


def test_a_start_says_how_many_of_each_kind_are_ready(loading):
    assert loading([], ["a", "b"], num_trainers=4) == "starting: 0 of 4 trainers, 0 of 2 producers loaded"
    text = loading(["done 0", "1"], ["done a", "done b"], ["done r", "s"], num_trainers=2)
    assert text == "starting: 1 of 2 trainers, 2 of 2 producers, 1 of 2 reward models loaded"
    assert loading(["done 0"], [], num_trainers=1) == "starting: 1 of 1 trainer loaded", "a job without producers"
