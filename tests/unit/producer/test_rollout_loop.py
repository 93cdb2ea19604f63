"""Test the producer's loop with a scripted coordinator, engine and reward: its requests and its results."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.errors import EngineError
from coati_rl.types import Completion, GenerationResult, Lease, Prompt, SamplingParams, Score
from coati_rl.work import LeaseReply
from producer.environments.single_turn import SingleTurn
from producer.group_runner import GroupRunner
from producer.rollout_loop import IDLE_WAIT_S, RolloutLoop

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
    """Answers whenever the loop waits: sample i is the text "a" * i, of the version that was asked for."""

    def __init__(self, refuses=(), dies_at=None, at_once=1, answers=lambda number: True):
        """`at_once`: answers at a time; `answers`: number of requests answered so far -> may the next one be."""
        self.at_once = at_once
        self.requests, self.waiting, self.refuses, self.dies_at = [], [], refuses, dies_at
        self.answers = answers
        self.max_waiting, self.aborted, self.num_answered = 0, [], 0

    def submit(self, request, on_tokens=None):
        self.requests.append(request)
        self.waiting.append((request, Future()))
        self.max_waiting = max(self.max_waiting, len(self.waiting))
        return self.waiting[-1][1]

    def answer(self):
        for _ in range(self.at_once):
            self.answer_one()

    def answer_one(self):
        if self.waiting and self.answers(len(self.requests) - len(self.waiting)):
            request, future = self.waiting.pop(0)
            if request.request_id == self.dies_at:
                for lost in (future, *(waiting for _, waiting in self.waiting)):
                    lost.set_exception(EngineError("the engine died"))
                self.waiting.clear()
            else:
                self.num_answered += 1
                future.set_result(self.result(request))

    def result(self, request):
        if request.request_id in self.refuses:
            return GenerationResult(request_id=request.request_id, error="too long")
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
        return GenerationResult(request_id=request.request_id, completions=completions)

    def check_alive(self):
        pass

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.waiting = [(request, future) for request, future in self.waiting if request.request_id != request_id]


class Reward:
    """The length of a response."""

    def submit(self, responses, problem):
        future = Future()
        verdicts = {"answer_correct": True, "format_valid": True, "verdict": "ok", "detail": problem.uid}
        future.set_result([Score(reward=float(len(response)), **verdicts) for response in responses])
        return future


@pytest.fixture
def roll_out(monkeypatch):
    """(leases, what goes wrong in the engine) -> coordinator and engine after the run."""

    def run(*leases, max_sequences=4, reward=None, coordinator=None, environment=None, **faults):
        coordinator, engine = coordinator or Coordinator(*leases), Engine(**faults)
        honest, taken = GroupRunner.take_finished, []

        def take_finished(self, timeout_s):
            engine.answer()
            finished = honest(self, timeout_s)
            taken.extend(finished)
            while len(taken) < engine.num_answered:  # an answer comes by way of a thread: a turn takes its own
                finished += (more := honest(self, 0.5))
                taken.extend(more)
            return finished

        monkeypatch.setattr(GroupRunner, "take_finished", take_finished)
        sizes = {"max_sequences": max_sequences, "group_size": 2}
        loop = RolloutLoop(3, coordinator, engine, reward or Reward(), environment=environment, **sizes)
        try:
            loop.run()
        except EngineError as error:
            coordinator.error = str(error)
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
    of_tokens = {
        group.lease_id: {round(float(each), 6) for trajectory in group.trajectories for each in trajectory.temperature}
        for group in coordinator.groups
    }
    assert of_tokens == {0: {0.7}, 1: {0.0}}


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


def test_episodes_that_their_environment_has_scored_are_not_scored_again_and_the_others_get_their_own_scores(roll_out):
    failed = Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail="broke")

    class FirstFails(SingleTurn):
        async def run(self, prompt, generate, *, group_size):
            rollout = await super().run(prompt, generate, group_size=group_size)
            return replace(rollout, scores={0: failed})

    coordinator, _ = roll_out(lease(0, group_size=3), environment=FirstFails())
    (group,) = coordinator.groups
    assert group.scores[0] == failed
    assert [(score.reward, score.verdict) for score in group.scores[1:]] == [(1.0, "ok"), (2.0, "ok")]


def test_a_prompt_that_the_engine_refuses_is_reported_and_the_others_go_on(roll_out):
    coordinator, _ = roll_out(lease(0), lease(1), refuses={"lease-0"})
    assert coordinator.failures == [(3, 0, "too long")]
    assert [group.lease_id for group in coordinator.groups] == [1]


def test_a_finished_prompt_makes_room_for_the_next(roll_out):
    coordinator, engine = roll_out(*map(lease, range(5)), max_sequences=4)
    assert engine.max_waiting == 2
    assert [room for room, _ in coordinator.asked[:5]] == [2, 1, 1, 1, 1]
    assert sorted(group.lease_id for group in coordinator.groups) == [0, 1, 2, 3, 4]


def test_room_is_counted_in_samples(roll_out):
    coordinator, engine = roll_out(*map(lease, range(3)), lease(3, group_size=4), lease(4), lease(5), max_sequences=8)
    # 8 samples are 4 prompts of 2. Then 2 + 2 + 2 + 4 are in flight, of which each turn answers the first: the first
    # answer leaves 8 and no room, the next one 6.
    assert [room for room, _ in coordinator.asked[:4]] == [4, 1, 1, 2]
    assert engine.max_waiting == 4


def test_a_prompt_of_one_sample_takes_the_place_of_a_training_prompt(roll_out):
    coordinator, engine = roll_out(*(lease(number, group_size=1) for number in range(5)), max_sequences=8)
    assert [room for room, _ in coordinator.asked[:2]] == [4, 1]
    assert engine.max_waiting == 4


def test_a_prompt_of_more_samples_than_fit_is_rolled_out_alone(roll_out):
    coordinator, engine = roll_out(lease(0, group_size=9), lease(1, group_size=9), max_sequences=2)
    assert engine.max_waiting == 1
    assert [len(group.trajectories) for group in coordinator.groups] == [9, 9]


def test_groups_are_handed_in_in_the_order_in_which_the_engine_answered(roll_out):
    coordinator, _ = roll_out(*map(lease, range(6)), max_sequences=12)
    assert [group.lease_id for group in coordinator.groups] == [0, 1, 2, 3, 4, 5]


def test_what_finished_before_the_engine_died_is_handed_in(roll_out):
    coordinator, _ = roll_out(*map(lease, range(4)), max_sequences=8, dies_at="lease-2", at_once=4)
    assert [group.lease_id for group in coordinator.groups] == [0, 1]
    assert coordinator.error == "the engine died"


def test_what_is_generating_at_the_end_of_the_run_is_aborted(roll_out):
    class Finishing(Coordinator):
        def lease(self, producer_id, **options):
            reply = super().lease(producer_id, **options)
            return replace(reply, is_finished=len(self.asked) == 2)

    _, engine = roll_out(coordinator=Finishing(*map(lease, range(3))), max_sequences=6)
    assert engine.aborted == ["lease-1", "lease-2"]


def test_a_score_is_handed_in_at_once_while_the_engine_is_full(roll_out):
    class Late(Reward):
        """Its scores come after a while, from a thread."""

        def submit(self, responses, problem):
            future, scores = Future(), super().submit(responses, problem).result()
            threading.Timer(0.05, future.set_result, [scores]).start()
            return future

    class Patient(Coordinator):
        def lease(self, producer_id, **options):
            return replace(super().lease(producer_id, **options), is_finished=len(self.groups) == 2)

    coordinator = Patient(lease(0), lease(1))
    begin = time.monotonic()
    roll_out(coordinator=coordinator, max_sequences=2, reward=Late(), answers=lambda n: n <= len(coordinator.groups))
    assert [group.lease_id for group in coordinator.groups] == [0, 1]
    assert time.monotonic() - begin < IDLE_WAIT_S  # which it would have waited for the request
