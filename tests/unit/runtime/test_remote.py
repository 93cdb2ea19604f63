"""Test the translation of Ray's errors, without starting Ray."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from coati_rl.errors import (
    ConfigError,
    CoordinatorReplacedError,
    EngineError,
    PeerLostError,
    RunError,
    TransferTimeoutError,
)
from coati_rl.runtime import remote
from coati_rl.runtime.remote import RemoteCoordinator, RemoteProducer, wait_for
from coati_rl.text import first_line
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous


@pytest.fixture
def answer(monkeypatch):
    """Make a remote call raise or return something; notes the timeouts of the waits for it."""
    timeouts = []

    def answer_with(outcome):
        def result(reference, *, timeout_s, meanwhile):
            timeouts.append(timeout_s)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(remote, "result", result)
        return timeouts

    return answer_with


def translated(outcome, answer):
    answer(outcome)
    with pytest.raises(RunError) as caught:
        wait_for("reference", who="producer-1", timeout_s=3.0)
    return caught.value


def task_error(cause):
    return RayTaskError("run", "Traceback ...", cause)


def test_a_result_comes_back_as_it_is(answer):
    timeouts = answer(42)
    assert wait_for("reference", who="producer-1", timeout_s=3.0) == 42
    assert timeouts == [3.0]


def test_no_answer_in_time_is_a_lost_peer(answer):
    error = translated(GetTimeoutError("slow"), answer)
    assert isinstance(error, PeerLostError)
    assert str(error) == "producer-1 did not answer within 3 s"


@pytest.mark.parametrize("outcome", [RayActorError(), ActorDiedError()])
def test_a_dead_actor_is_a_lost_peer(answer, outcome):
    error = translated(outcome, answer)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith("producer-1 died: ")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "cause", [EngineError("the engine died: x"), TransferTimeoutError("rank 1, bucket 2"), RunError("y")]
)
def test_our_own_errors_arrive_as_they_were_raised(answer, cause):
    assert translated(task_error(cause), answer) is cause


def test_a_users_mistake_found_by_an_actor_stays_one(answer):
    answer(task_error(ConfigError("--model x: cannot be loaded")))
    with pytest.raises(ConfigError, match="--model x"):
        wait_for("reference", who="trainer-0", timeout_s=3.0)


def test_any_other_error_is_told_with_its_kind_in_one_line(answer):
    error = translated(task_error(ZeroDivisionError("\n  by nothing\nmore\n")), answer)
    assert type(error) is RunError
    assert str(error) == "producer-1 failed: ZeroDivisionError: by nothing"
    assert isinstance(error.__cause__, RayTaskError), "the remote traceback is kept for the log"


def test_what_is_rays_own_fault_ends_the_run_too(answer):
    error = translated(ObjectLostError("ab" * 28, None, "here"), answer)
    assert type(error) is RunError and str(error).startswith("producer-1: ")


def test_an_error_without_words_is_told_by_its_kind():
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("\n\n a \nb")) == "a"


class Handle:
    """An actor handle that notes its calls."""

    def __init__(self, actor_id=""):
        self.calls, self.made, self._actor_id = [], [], actor_id

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args, **kwargs: self._note(method, args, kwargs))

    def _note(self, *call):
        self.calls.append(call)
        self.made.append(reference := object())
        return reference


def test_a_long_poll_may_take_its_time_and_a_little_more(answer):
    timeouts, handle = answer(GetTimeoutError("slow")), Handle()
    with pytest.raises(PeerLostError, match="the coordinator did not answer within 35 s"):
        RemoteCoordinator(handle, replace=none_takes_over).next_work(7, rank=1, timeout_s=5.0)
    assert handle.calls == [("next_work", (7,), {"rank": 1, "timeout_s": 5.0})]
    assert timeouts == [5.0 + remote.ANSWER_S]


def none_takes_over(error):
    raise error


@pytest.fixture
def replaced(monkeypatch):
    """A coordinator that is dead, under whose name another one is found the second time one looks; its calls."""
    dead, another = Handle(actor_id="dead"), Handle(actor_id="another")
    found = [dead, another]
    monkeypatch.setattr(remote.ray, "get_actor", lambda name: found.pop(0) if len(found) > 1 else another)
    monkeypatch.setattr(remote, "_LOOK_S", 0.0)

    def result(reference, *, timeout_s, meanwhile):
        if reference in dead.made:
            raise RayActorError
        return (3, 4)

    monkeypatch.setattr(remote, "result", result)
    return RemoteCoordinator(dead), another.calls


def test_a_trainers_call_is_made_again_when_another_coordinator_has_taken_over(replaced):
    coordinator, calls = replaced
    coordinator.report_step(5, {"loss": 1.0})
    assert calls == [("report_step", (5, {"loss": 1.0}), {})]


def test_two_threads_find_the_same_one(replaced):
    coordinator, calls = replaced
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(coordinator.report_saved, (2, 4), ("a", "b")))
    assert sorted(calls) == [("report_saved", (2, "a"), {}), ("report_saved", (4, "b"), {})]


def test_a_producer_is_told_that_another_coordinator_has_taken_over_and_says_to_it_what_it_holds(replaced):
    coordinator, calls = replaced
    with pytest.raises(CoordinatorReplacedError, match="another coordinator has taken over: the coordinator died"):
        coordinator.lease(1, max_prompts=2, timeout_s=0.0, is_drained=False)
    assert coordinator.rejoin(1, [3, 4, 5]) == (3, 4)
    assert calls == [("rejoin", (1, [3, 4, 5]), {})]


def test_the_remote_coordinator_has_every_method_of_the_real_one():
    from coati_rl.coordinator.coordinator import Coordinator
    from coati_rl.coordinator.dataset_coordinator import DatasetCoordinator

    both = {**vars(Coordinator), **vars(DatasetCoordinator)}
    methods = {name for name, value in both.items() if callable(value) and not name.startswith("_")}
    assert methods == {name for name in vars(RemoteCoordinator) if not name.startswith("_")}


def test_the_remote_coordinator_can_be_sent_to_an_actor():
    assert isinstance(pickle.loads(pickle.dumps(RemoteCoordinator("handle"))), RemoteCoordinator)


def test_a_producer_that_is_gone_is_a_lost_peer(monkeypatch):
    def get_actor(name, namespace):
        raise ValueError(f"Failed to look up actor with name '{name}'")

    monkeypatch.setattr(remote.ray, "get_actor", get_actor)
    with pytest.raises(PeerLostError, match="producer-3 has ended"):
        RemoteProducer("producer-3", "coati-rl")


def test_weights_are_announced_to_a_producer_as_json_with_a_deadline(monkeypatch, answer):
    handle = Handle()
    answer(("digest",))
    monkeypatch.setattr(remote.ray, "get_actor", lambda name, namespace: handle)
    manifest = WeightManifest(policy_version=4, entries=(TensorEntry(name="w", dtype="float32", shape=(2,)),))
    invitation = Rendezvous(backend="gloo", secret="5e" * 16, host="127.0.0.1", port=1, world_size=2, first_rank=1)
    producer = RemoteProducer("producer-0", "coati-rl")
    assert producer.stage_weights(manifest, invitation, timeout_s=60.0) == ("digest",)
    assert handle.calls == [("stage_weights", (manifest.to_json(), invitation.to_json(), 60.0), {})]
    timeouts = answer(GetTimeoutError("slow"))
    timeouts.clear()
    with pytest.raises(PeerLostError):
        producer.stage_weights(manifest, invitation, timeout_s=60.0)
    assert sum(timeouts) == 60.0 + remote.STAGING_GRACE_S
    timeouts.clear()
    with pytest.raises(PeerLostError):
        producer.commit_weights(4, [7, 8], timeout_s=60.0)
    assert handle.calls[-1] == ("commit_weights", (4, (7, 8), 60.0), {})
    assert sum(timeouts) == 60.0 + 2 * remote.ANSWER_S
