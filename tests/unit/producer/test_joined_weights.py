"""Test the weights of a producer that has joined over HTTPS: real transport, requests without a network."""

from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import numpy as np
import pytest
import torch

from coati_rl.errors import EngineError, PeerLostError
from coati_rl.transport.manifest import build_manifest
from coati_rl.transport.wire import WeightSender
from coati_rl.types import CommitResult
from producer.engines.fake_engine import FakeEngine
from producer.joining.frames import Frame, commit_frame, read_commit
from producer.joining.joined_producer import JoinedProducer
from producer.joining.received_weights import JoinedWeights

WHOLE, DELTA = "whole", "delta"


class Requests:
    """Ask the run's side directly; notes how each update came."""

    def __init__(self, producer):
        self.producer, self.came, self.is_dead = producer, [], False

    def ask(self, call, frame=None, **fields):
        given = frame or Frame(fields={})
        body = Frame(fields={**given.fields, **fields}, payload=given.payload).to_bytes()
        reply = Frame.from_bytes(self.producer.answer(call, Frame.from_bytes(body)).to_bytes())
        if self.is_dead:
            raise PeerLostError("this process was killed")
        if call == "bucket" and fields["index"] == 0:
            self.came.append(DELTA if reply.fields["is_delta"] else WHOLE)
        return reply


class World:
    """One trainer, the run's side of a producer, and the producer; `restart` makes another producer's process."""

    def __init__(self):
        self.sender = WeightSender()
        self.producer = JoinedProducer(lost_after_s=30.0, commits_in_flight=True)
        self.engine = FakeEngine(vocab_size=50, eos_token_id=0, max_model_len=64)
        self.requests, self.errors = Requests(self.producer), []
        self.weights = JoinedWeights(self.requests, self.engine, self.errors.append)

    def restart(self):
        self.weights._is_over.set()
        self.requests.is_dead = True
        self.requests = Requests(self.producer)
        self.weights = JoinedWeights(self.requests, self.engine, self.errors.append)

    def stage(self, tensors, version):
        manifest = build_manifest(tensors, policy_version=version, bucket_bytes=4096)
        if not self.sender.is_open:
            (self.invitation,) = self.sender.open([1])
        with ThreadPoolExecutor(1) as pool:
            staging = pool.submit(self.producer.stage_weights, manifest.to_json(), self.invitation.to_json(), 20.0)
            digest = self.sender.send(manifest, tensors, timeout_s=20.0)
            assert staging.result() == (digest,)

    def commit(self, version):
        return self.producer.commit_weights(version, (1, 2, 3), 20.0)

    def close(self):
        self.producer.end()
        self.weights.close()
        self.engine.close()
        self.sender.close()


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def weights(rng):
    numbers = torch.from_numpy(rng.standard_normal(5000).astype(np.float32))
    return [("a", numbers[:3000].bfloat16()), ("b", numbers[3000:])]


def changed(tensors, rng):
    found = []
    for name, tensor in tensors:
        bits = tensor.clone().view(torch.uint8)
        bits[:: tensor.itemsize] ^= torch.from_numpy((rng.random(tensor.numel()) < 0.05).astype(np.uint8))
        found.append((name, bits.view(tensor.dtype)))
    return found


def test_updates_are_bit_equal_with_restarts_damage_and_versions_that_are_skipped(world):
    rng = np.random.default_rng(0)
    tensors, version, expected = weights(rng), 0, []
    for turn in range(20):
        tensors, version = changed(tensors, rng), version + int(rng.integers(1, 4))
        world.stage(tensors, version)
        if turn % 5 == 3:  # an update that is not committed: the next one is staged in its place
            tensors, version = changed(tensors, rng), version + 1
            world.stage(tensors, version)
        expected.append([DELTA])
        if turn % 6 == 0:
            world.restart()
            expected[-1] = [WHOLE]
        elif turn % 7 == 2:  # a bit of what is held flips in memory
            world.weights._copy.bucket(0)[100] ^= 1
            expected[-1] = [DELTA, WHOLE]
        world.requests.came = []
        result = world.commit(version)
        assert world.requests.came == expected[-1]
        assert world.engine.policy_version == version and result.identities
        for (name, held), (other, sent) in zip(world.weights._copy.tensors, tensors, strict=True):
            assert name == other and torch.equal(held.view(torch.uint8), sent.view(torch.uint8))
    assert not world.errors


@pytest.mark.parametrize("routes", [None, np.arange(12, dtype=np.uint16).reshape(3, 2, 2)])
def test_a_commit_travels_with_the_log_probabilities_and_the_routes_of_its_probe(routes):
    logprobs = np.array([-0.5, -1.25], dtype=np.float32)
    sent = CommitResult(seconds=0.5, probe_logprobs=logprobs, identities=("a",), probe_routes=routes)
    back = read_commit(Frame.from_bytes(commit_frame(sent).to_bytes()))
    assert (back.seconds, back.identities, back.probe_logprobs.tolist()) == (0.5, ("a",), [-0.5, -1.25])
    if routes is None:
        assert back.probe_routes is None
    else:
        assert back.probe_routes.dtype == np.uint16
        np.testing.assert_array_equal(back.probe_routes, routes)


def test_a_producer_that_says_another_digest_does_not_get_prompts(world):
    world.weights._is_over.set()
    world.requests.is_dead = True
    world.requests = Requests(world.producer)
    world.stage(weights(np.random.default_rng(1)), 1)
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(world.commit, 1)
        while world.requests.ask("order").fields["order"] is None:
            pass
        with pytest.raises(EngineError, match="serves weights of digest ff"):
            world.requests.ask("committed", digest="ff", seconds=0.0, identities=[])
        world.requests.ask("committed", digest="", error="its engine has ended")
        with pytest.raises(EngineError, match="its engine has ended"):
            committing.result()


def test_a_producer_that_is_silent_is_lost_and_may_not_go_on():
    producer = JoinedProducer(lost_after_s=0.05, commits_in_flight=False)
    with pytest.raises(PeerLostError, match="no request for"):
        producer.run(None)
    with pytest.raises(PeerLostError, match="no request for"):
        producer.answer("beat", Frame(fields={}))


def test_a_commit_of_a_producer_that_has_left_ends_when_the_run_lets_it_go_and_nothing_is_held_for_it(world):
    tensors = weights(np.random.default_rng(0))
    world.stage(tensors, 1)
    world.commit(1)
    world.stage(tensors, 2)
    world.requests.ask("leave")
    world.weights.close()
    Timer(0.1, world.producer.end).start()
    with pytest.raises(PeerLostError, match="the run has let it go"):  # by then it has said that the producer has left
        world.commit(2)
    assert world.producer._staged is world.producer._proved is None
