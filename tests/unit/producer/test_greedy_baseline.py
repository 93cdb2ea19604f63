"""Leases with a baseline: one more answer, the last, is greedy, however an environment asks, and in no group."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from coati_rl.errors import RolloutError
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import (
    Completion,
    GenerationResult,
    Lease,
    Prompt,
    SamplingParams,
    Score,
    SharedPrefix,
    Trajectory,
    Turn,
)
from coati_rl.work import LeaseReply
from producer.environments.environment import Rollout
from producer.environments.single_turn import SampleBySample, SingleTurn
from producer.generation import LeaseGenerate
from producer.rollout_loop import RolloutLoop

WARM = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=5, stop=("END",), seed=11)
GREEDY, SAMPLED = (0.0, 1.0, None), (0.7, 0.9, 5)


def lease(*, group_size=2, has_baseline=True):
    prompt = Prompt(uid="p0", token_ids=(1, 2), ground_truth="4")
    return Lease(lease_id=0, prompt=prompt, group_size=group_size, sampling=WARM, has_baseline=has_baseline)


class Engine:
    """Answers at once with as many tokens as requests came before, plus one; a greedy one says so."""

    def __init__(self, refuses=()):
        self.requests, self.aborted, self._refuses = [], [], refuses

    def submit(self, request, on_tokens=None):
        self.requests.append(request)
        future = Future()
        if request.request_id in self._refuses:
            future.set_result(GenerationResult(request_id=request.request_id, error="refused"))
            return future
        num_tokens = len(self.requests)
        completion = Completion(
            token_ids=np.full(num_tokens, 7, dtype=np.int32),
            logprobs=np.zeros(num_tokens, dtype=np.float32),
            policy_versions=np.zeros(num_tokens, dtype=np.int32),
            finish_reason="stop",
            text="greedy" if request.sampling.temperature == 0 else "sampled",
        )
        completions = (completion,) * request.num_samples
        future.set_result(GenerationResult(request_id=request.request_id, completions=completions))
        return future

    def abort(self, request_id):
        self.aborted.append(request_id)

    def check_alive(self):
        pass

    def open_episode(self, episode_id):
        pass

    def close_episode(self, episode_id):
        pass


class Coordinator:
    """Gives one lease, and keeps what comes back."""

    def __init__(self, given):
        self._given, self._left = given, [given]
        self.groups, self.packed = [], []

    def lease(self, producer_id, *, max_prompts, timeout_s, is_drained):
        taken, self._left = self._left[:max_prompts], self._left[max_prompts:]
        return LeaseReply(leases=tuple(taken), policy_version=0, is_finished=not taken and is_drained)

    def put(self, producer_id, groups):
        self.packed += groups
        self.groups += [each.unpack(self._given.prompt, temperature=0.7) for each in groups]


class Reward:
    """1 for each response in order, 2, 3, ..."""

    def submit(self, responses, problem):
        future = Future()
        scores = [
            Score(reward=float(number), answer_correct=True, format_valid=True, verdict="ok", detail=text)
            for number, text in enumerate(responses, 1)
        ]
        future.set_result(scores)
        return future


class TwoTurns:
    """Asks twice in each episode, the second time at a temperature of its own; scores the second episode itself."""

    async def run(self, prompt, generate, *, group_size):
        episodes = (self._episode(prompt, generate, number) for number in range(group_size))
        own = Score(reward=-1.0, answer_correct=False, format_valid=True, verdict="wrong")
        records = {number: {"ended": f"{number}"} for number in range(group_size)}
        return Rollout(trajectories=await asyncio.gather(*episodes), scores={1: own}, records=records)

    async def _episode(self, prompt, generate, number):
        (first,) = await generate(prompt.token_ids, episode=number)
        context = [*prompt.token_ids, *first.token_ids.tolist()]
        (second,) = await generate(context, episode=number, sampling={"temperature": 1.5, "max_new_tokens": 3})
        start, middle, end = 2, len(context), len(context) + len(second.token_ids)
        return Trajectory(
            token_ids=np.array([*context, *second.token_ids], dtype=np.int32),
            loss_mask=np.arange(end) >= start,
            logprobs=np.zeros(end - start, dtype=np.float32),
            policy_versions=np.zeros(end - start, dtype=np.int32),
            temperature=np.ones(end - start, dtype=np.float32),
            episode=number,
            turns=(
                Turn(index=0, start=start, end=middle, finish_reason="stop"),
                Turn(index=1, start=middle, end=end, finish_reason="stop"),
            ),
            text=second.text,
            prefix=SharedPrefix(num_tokens=start),
        )


def roll_out(environment, given):
    coordinator, engine = Coordinator(given), Engine()
    sizes = {"max_sequences": 6, "group_size": given.group_size + given.has_baseline}
    RolloutLoop(3, coordinator, engine, Reward(), environment=environment, **sizes).run()
    (group,) = coordinator.groups
    return group, engine.requests


def sampling_of(request):
    return request.sampling.temperature, request.sampling.top_p, request.sampling.top_k


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_single_turn_is_a_request_for_the_group_as_without_a_baseline_and_a_greedy_one(group_size):
    group, (sampled, greedy) = roll_out(SingleTurn(), lease(group_size=group_size))
    _, (alone,) = roll_out(SingleTurn(), lease(group_size=group_size, has_baseline=False))
    assert sampled == alone
    assert (greedy.num_samples, sampling_of(greedy)) == (1, GREEDY)
    assert (greedy.sampling.max_new_tokens, greedy.sampling.stop) == (5, ("END",))
    assert [each.text for each in group.trajectories] == ["sampled"] * group_size
    assert [score.reward for score in group.scores] == [1.0, 2.0, 3.0][:group_size]
    # The second answer of the engine has two tokens.
    assert (group.baseline.score.reward, group.baseline.score.detail) == (group_size + 1.0, "greedy")
    assert group.baseline.num_tokens == 2


def test_samples_that_are_asked_for_one_by_one_have_the_greedy_one_last():
    group, requests = roll_out(SampleBySample(), lease())
    assert [sampling_of(each) for each in requests] == [SAMPLED, SAMPLED, GREEDY]
    assert [each.sampling.seed for each in requests[:2]] == [11, 12]
    assert [score.detail for score in group.scores] == ["sampled", "sampled"]
    assert group.baseline.score.detail == "greedy"


def test_all_turns_of_the_last_episode_are_greedy_whatever_they_ask_for_and_it_is_taken_out_of_its_group():
    group, requests = roll_out(TwoTurns(), lease())
    asked = {number: [each for each in requests if each.episode_id == f"lease-0-{number}"] for number in range(3)}
    assert [sampling_of(each) for each in asked[0]] == [SAMPLED, (1.5, 0.9, 5)]
    assert [sampling_of(each) for each in asked[2]] == [GREEDY, GREEDY]
    assert [each.sampling.max_new_tokens for each in asked[2]] == [5, 3]
    assert [each.episode for each in group.trajectories] == [0, 1]
    assert [score.reward for score in group.scores] == [1.0, -1.0]
    assert [record["ended"] for record in group.records] == ["0", "1"]
    # Episode 2 has the tokens of its two answers, the third and the sixth of the engine.
    assert (group.baseline.score.reward, group.baseline.num_tokens) == (2.0, 3 + 6)


def test_a_lease_without_a_baseline_has_none():
    group, requests = roll_out(SingleTurn(), lease(has_baseline=False))
    assert group.baseline is None and [each.num_samples for each in requests] == [2]


@pytest.mark.parametrize("refused", ["lease-0", "lease-0/1"])
def test_a_refusal_of_either_request_fails_the_prompt(refused):
    async def ask():
        loop = asyncio.get_running_loop()
        generate = LeaseGenerate(
            lease(),
            Engine(refuses={refused}),
            call_soon=loop.call_soon_threadsafe,
            min_policy_version=0,
            timeline=NO_TIMELINE,
        )
        await generate((1, 2), num_samples=3)

    with pytest.raises(RolloutError, match="refused"):
        asyncio.run(ask())
