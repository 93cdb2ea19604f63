"""The producer's loop between a scripted coordinator, engine and reward: what it asks for, and what it hands in."""

from concurrent.futures import Future

import numpy as np
import pytest

from coati_rl.data.work import LeaseReply
from coati_rl.types import Completion, GenerationResult, Lease, Prompt, SamplingParams, Score
from producer.rollout_loop import RolloutLoop

WARM = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=5, stop=("END",), seed=11)
GREEDY = SamplingParams(temperature=0.0, seed=12)


def lease(number, sampling=WARM, group_size=2):
    prompt = Prompt(uid=f"p{number}", token_ids=(1, number), ground_truth=str(number))
    return Lease(lease_id=number, prompt=prompt, group_size=group_size, sampling=sampling)


class Coordinator:
    """Hands out leases, at policy version 4, and notes what comes back."""

    def __init__(self, *leases):
        self.leases = list(leases)
        self.given = {lease.lease_id: lease for lease in leases}
        self.asked, self.groups, self.failures = [], [], []

    def lease(self, producer_id, *, max_prompts, timeout_s, is_drained):
        self.asked.append((max_prompts, is_drained))
        taken, self.leases = self.leases[:max_prompts], self.leases[max_prompts:]
        is_finished = not taken and is_drained
        return LeaseReply(leases=tuple(taken), policy_version=4, is_finished=is_finished)

    def put(self, producer_id, groups):
        for packed in groups:
            taken = self.given[packed.lease_id]
            self.groups.append(packed.unpack(taken.prompt, temperature=taken.sampling.temperature))

    def fail(self, producer_id, lease_id, cause):
        self.failures.append((producer_id, lease_id, cause))


class Engine:
    """Answers one request a poll: sample i is the text "a" * i, sampled by the version that was asked for."""

    def __init__(self, refuses=()):
        self.requests, self.waiting, self.refuses = [], [], refuses
        self.max_waiting = 0

    def submit(self, request):
        self.requests.append(request)
        self.waiting.append(request)
        self.max_waiting = max(self.max_waiting, len(self.waiting))

    def poll(self, timeout_s):
        if not self.waiting:
            return []
        request = self.waiting.pop(0)
        if request.request_id in self.refuses:
            return [GenerationResult(request_id=request.request_id, error="too long")]
        completions = tuple(
            Completion(
                token_ids=np.array([7, 8], dtype=np.int32),
                logprobs=np.array([-1.0, -2.0], dtype=np.float32),
                policy_versions=np.full(2, request.min_policy_version, dtype=np.int32),
                finish_reason="stop",
                text="a" * index,
            )
            for index in range(request.num_samples)
        )
        return [GenerationResult(request_id=request.request_id, completions=completions)]


class Reward:
    """The length of a response."""

    def submit(self, responses, problem):
        future = Future()
        verdicts = {"answer_correct": True, "format_valid": True, "verdict": "ok", "detail": problem.uid}
        future.set_result([Score(reward=float(len(response)), **verdicts) for response in responses])
        return future


@pytest.fixture
def roll_out():
    """(leases, requests that the engine refuses) -> coordinator and engine after the run."""

    def run(*leases, refuses=(), max_in_flight=2):
        coordinator, engine = Coordinator(*leases), Engine(refuses)
        RolloutLoop(3, coordinator, engine, Reward(), max_in_flight=max_in_flight).run()
        return coordinator, engine

    return run


def test_a_request_is_what_the_lease_says(roll_out):
    _, engine = roll_out(lease(0, group_size=3))
    (request,) = engine.requests
    assert (request.token_ids, request.num_samples, request.sampling) == ((1, 0), 3, WARM)
    assert request.min_policy_version == 4


def test_a_group_carries_the_temperature_that_its_samples_were_drawn_at(roll_out):
    coordinator, _ = roll_out(lease(0), lease(1, GREEDY))
    assert {group.lease_id: group.temperature for group in coordinator.groups} == {0: 0.7, 1: 0.0}


def test_a_group_holds_its_prompts_samples_and_scores_in_order(roll_out):
    coordinator, _ = roll_out(lease(0), lease(1))
    assert [(group.lease_id, group.producer_id, group.prompt.uid) for group in coordinator.groups] == [
        (0, 3, "p0"),
        (1, 3, "p1"),
    ]
    for group in coordinator.groups:
        assert [trajectory.text for trajectory in group.trajectories] == ["", "a"]
        assert [(score.reward, score.detail) for score in group.scores] == [
            (0.0, group.prompt.uid),
            (1.0, group.prompt.uid),
        ]


def test_a_prompt_that_the_engine_refuses_is_reported_and_the_others_go_on(roll_out):
    coordinator, _ = roll_out(lease(0), lease(1), refuses={"lease-0"})
    assert coordinator.failures == [(3, 0, "too long")]
    assert [group.lease_id for group in coordinator.groups] == [1]


def test_a_finished_prompt_makes_room_for_the_next(roll_out):
    coordinator, engine = roll_out(*map(lease, range(5)), max_in_flight=2)
    assert engine.max_waiting == 2
    assert [room for room, _ in coordinator.asked[:5]] == [2, 1, 1, 1, 1]
    assert sorted(group.lease_id for group in coordinator.groups) == [0, 1, 2, 3, 4]
