"""Test a producer whose places are counted by samples: how full its engine is, and that samples are the same."""

import random
from concurrent.futures import Future

import numpy as np
import pytest

from coati_rl.errors import EngineError
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import Completion, GenerationResult, Lease, Prompt, SamplingParams
from producer.engines.fake_engine import FakeEngine
from producer.environments.single_turn import SampleBySample, SingleTurn
from producer.group_runner import GroupRunner

PLACES, GROUP_SIZE = 64, 8
MEAN_LENGTH = 61
NUM_STEPS = 2000


def lease(number, group_size=GROUP_SIZE):
    prompt = Prompt(uid=f"p{number}", token_ids=(1, 2, 3 + number), ground_truth="")
    sampling = SamplingParams(seed=100 * number, max_new_tokens=40)
    return Lease(lease_id=number, prompt=prompt, group_size=group_size, sampling=sampling)


class SteppedEngine:
    """Gives each of the first samples a token a step; lengths are geometric, and those of a seed are the same."""

    def __init__(self):
        self.requests = {}  # by id: the request, its future, tokens that its samples still need
        self.num_decoded = self.most = 0
        self.dies = False

    def submit(self, request, on_tokens=None):
        draws = [random.Random(request.sampling.seed + index).random() for index in range(request.num_samples)]
        lengths = [int(np.log(1 - draw) / np.log(1 - 1 / MEAN_LENGTH)) + 1 for draw in draws]
        self.requests[request.request_id] = request, Future(), lengths
        return self.requests[request.request_id][1]

    def num_sequences(self):
        return sum(request.num_samples for request, _, _ in self.requests.values())

    def abort(self, request_id):
        self.requests.pop(request_id, None)

    def check_alive(self):
        pass

    def step(self):
        free = PLACES
        for request, future, lengths in [*self.requests.values()]:
            for index, length in enumerate(lengths):
                if length and free:
                    lengths[index] -= 1
                    free -= 1
            if not any(lengths):
                del self.requests[request.request_id]
                future.set_result(self.result(request))
        self.num_decoded += PLACES - free

    def die(self):
        for request, future, _ in [*self.requests.values()]:
            del self.requests[request.request_id]
            future.set_exception(EngineError("the engine died"))

    def result(self, request):
        nothing = np.zeros(0, dtype=np.float32)
        empty = Completion(
            token_ids=nothing.astype(np.int32),
            logprobs=nothing,
            policy_versions=nothing.astype(np.int32),
            finish_reason="stop",
            text="",
        )
        return GenerationResult(request_id=request.request_id, completions=(empty,) * request.num_samples)


def make_runner(engine, *, by_sample):
    environment = SampleBySample() if by_sample else SingleTurn()
    options = {"max_sequences": PLACES, "group_size": GROUP_SIZE, "timeline": NO_TIMELINE}
    return GroupRunner(engine, environment, by_sample=by_sample, **options)


def idle_share(*, by_sample):
    """The share of places that decode nothing, with prompts without end, and the most samples in the engine."""
    engine, number, most = SteppedEngine(), 0, 0
    runner = make_runner(engine, by_sample=by_sample)
    for _ in range(NUM_STEPS):
        room = runner.room()
        runner.submit([lease(number + index) for index in range(room)], min_policy_version=0)
        number += room
        most = max(most, engine.num_sequences())
        engine.step()
        runner.take_finished(0.0)
    runner.close()
    assert not engine.requests, "what nobody waits for is aborted"
    return 1 - engine.num_decoded / (PLACES * NUM_STEPS), most


def test_a_sample_that_ends_makes_room_so_that_an_engine_of_long_tails_stays_full():
    assert idle_share(by_sample=False)[0] > 0.5
    share, most = idle_share(by_sample=True)
    assert share < 0.01
    assert most < PLACES + GROUP_SIZE


def sampled(*, by_sample):
    engine = FakeEngine(vocab_size=50, eos_token_id=0, max_model_len=64)
    runner = make_runner(engine, by_sample=by_sample)
    leases = [lease(number) for number in range(3)] + [lease(3, group_size=1)]
    runner.submit(leases, min_policy_version=0)
    done = []
    while len(done) < len(leases):
        done += runner.take_finished(1.0)
    runner.close()
    engine.close()
    return {
        each.lease.lease_id: [
            (one.episode, one.token_ids.tolist(), one.logprobs.tolist(), one.finish_reason, one.text)
            for one in each.trajectories
        ]
        for each in done
    }


def test_samples_that_are_asked_for_one_by_one_are_those_of_the_group():
    samples = sampled(by_sample=True)
    assert samples == sampled(by_sample=False)
    assert [len(samples[number]) for number in range(4)] == [GROUP_SIZE] * 3 + [1]


def test_an_engine_that_dies_under_several_samples_of_a_prompt_ends_the_producer_with_its_message():
    engine = SteppedEngine()
    runner = make_runner(engine, by_sample=True)
    runner.submit([lease(0)], min_policy_version=0)
    engine.die()
    with pytest.raises(EngineError, match="the engine died"):
        while not runner.take_finished(1.0):
            pass
    runner.close()


def test_a_sample_that_is_refused_fails_its_prompt_and_ends_the_others():
    engine = SteppedEngine()
    runner = make_runner(engine, by_sample=True)
    runner.submit([lease(0), lease(1)], min_policy_version=0)
    refused, future, _ = engine.requests.pop("lease-0/3")
    future.set_result(GenerationResult(request_id=refused.request_id, error="too long"))
    done = []
    while not done:
        done = runner.take_finished(1.0)  # an answer alone ends the wait, as it may make room
    (failed,) = done
    assert (failed.lease.lease_id, failed.error) == (0, "too long")
    assert {request_id.partition("/")[0] for request_id in engine.requests} == {"lease-1"}
    runner.close()
