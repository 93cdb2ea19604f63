"""Environments of more than one turn between a real fake engine and the runner: requests, episodes, failures, ends."""

import asyncio
import socket
import time

import numpy as np
import pytest

from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import Lease, Prompt, SamplingParams, SharedPrefix, Trajectory, Turn
from producer.engines import EngineOptions, create_engine
from producer.environments.environment import Rollout
from producer.environments.single_turn import SingleTurn
from producer.group_runner import GroupRunner

WARM = SamplingParams(temperature=0.7, max_new_tokens=4, seed=11)
TIMEOUT_S = 20.0


def lease(number=0, group_size=2):
    prompt = Prompt(uid=f"p{number}", token_ids=(1, 2, 3), ground_truth="4")
    return Lease(lease_id=number, prompt=prompt, group_size=group_size, sampling=WARM)


class TwoTurns:
    """Episodes of two turns each, all at the same time; before its second turn, episode i waits for `waits_s[i]`."""

    def __init__(self, waits_s=(0.0, 0.0)):
        self.waits_s = waits_s

    async def run(self, prompt, generate, *, group_size):
        episodes = (self._episode(prompt, generate, index) for index in range(group_size))
        return Rollout(trajectories=await asyncio.gather(*episodes))

    async def _episode(self, prompt, generate, index):
        (first,) = await generate(prompt.token_ids, episode=index)
        context = [*prompt.token_ids, *first.token_ids.tolist(), 5]
        await asyncio.sleep(self.waits_s[index])
        (second,) = await generate(context, episode=index)
        start, end = len(prompt.token_ids), len(context)
        turns = [(start, end - 1, first), (end, end + len(second.token_ids), second)]
        return Trajectory(
            token_ids=np.array([*context, *second.token_ids], dtype=np.int32),
            loss_mask=np.array(
                [False] * start + [True] * len(first.token_ids) + [False] + [True] * len(second.token_ids)
            ),
            logprobs=np.concatenate([first.logprobs, second.logprobs]),
            policy_versions=np.concatenate([first.policy_versions, second.policy_versions]),
            temperature=np.full(len(first.token_ids) + len(second.token_ids), generate.temperature, dtype=np.float32),
            episode=index,
            turns=tuple(
                Turn(index=i, start=a, end=b, finish_reason=c.finish_reason) for i, (a, b, c) in enumerate(turns)
            ),
            text=second.text,
            prefix=SharedPrefix(num_tokens=start),
        )


class NotingEngine:
    """The fake engine, and what it was asked for."""

    def __init__(self, engine):
        self._engine = engine
        self.requests, self.aborted, self.opened, self.closed = [], [], [], []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, request, on_tokens=None):
        self.requests.append(request)
        return self._engine.submit(request, on_tokens)

    def abort(self, request_id):
        self.aborted.append(request_id)
        self._engine.abort(request_id)

    def open_episode(self, episode_id):
        self.opened.append(episode_id)
        self._engine.open_episode(episode_id)

    def close_episode(self, episode_id):
        self.closed.append(episode_id)
        self._engine.close_episode(episode_id)


@pytest.fixture
def engine(model_dir):
    options = EngineOptions(model=str(model_dir), max_model_len=64, max_num_seqs=8)
    engine = create_engine("fake", options, load_timeout_s=60.0)
    yield NotingEngine(engine)
    engine.close()


@pytest.fixture
def make_runner(engine):
    runners = []

    def make(environment, *, max_sequences=8):
        runners.append(
            GroupRunner(engine, environment, max_sequences=max_sequences, group_size=2, timeline=NO_TIMELINE)
        )
        return runners[-1]

    yield make
    for runner in runners:
        if not runner._loop.is_closed():
            runner.close()


def finish(runner, number=1):
    """What comes out, in order."""
    finished, deadline = [], time.monotonic() + TIMEOUT_S
    while len(finished) < number:
        assert time.monotonic() < deadline
        finished += runner.take_finished(0.5)
    return finished


def test_each_turn_of_each_episode_has_a_seed_of_its_own_whatever_comes_first(make_runner, engine):
    responses = []
    for waits_s in ((0.0, 0.2), (0.2, 0.0)):
        runner = make_runner(TwoTurns(waits_s))
        runner.submit([lease()], min_policy_version=0)
        (done,) = finish(runner)
        responses.append([trajectory.token_ids.tolist() for trajectory in done.trajectories])
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds[:4])) == 4 and sorted(seeds[:4]) == sorted(seeds[4:])
    assert responses[0] == responses[1], "what a tool takes has no influence on what is sampled"


def test_episodes_are_open_while_their_environment_runs_and_closed_after_it(make_runner, engine):
    runner = make_runner(TwoTurns())
    runner.submit([lease(7)], min_policy_version=0)
    assert (engine.opened, engine.closed) == (["lease-7-0", "lease-7-1"], [])
    finish(runner)
    assert engine.closed == engine.opened
    assert [request.episode_id for request in engine.requests[:2]] == engine.opened
    assert len({request.request_id for request in engine.requests}) == 4


def test_a_group_that_waits_for_a_tool_holds_its_place_and_no_other_up(make_runner, engine):
    runner = make_runner(TwoTurns((0.3, 0.0)), max_sequences=4)
    runner.submit([lease(0)], min_policy_version=0)
    assert (runner.room(), runner.is_drained) == (1, False)
    runner._environment = SingleTurn()
    runner.submit([lease(1)], min_policy_version=0)
    first, second = finish(runner, 2)
    assert (first.lease.lease_id, second.lease.lease_id) == (1, 0)
    assert (runner.room(), runner.is_drained) == (2, True)


def test_an_environment_may_wait_for_a_socket_while_the_engine_answers_others(make_runner):
    near, far = socket.socketpair()
    near.setblocking(False)

    class Asks(SingleTurn):
        async def run(self, prompt, generate, *, group_size):
            rollout = await super().run(prompt, generate, group_size=group_size)
            if prompt.uid == "p0":
                assert await asyncio.get_running_loop().sock_recv(near, 1) == b"!"
            return rollout

    with near, far:
        runner = make_runner(Asks())
        runner.submit([lease(0), lease(1)], min_policy_version=0)
        (first,) = finish(runner)
        runner.submit([lease(2)], min_policy_version=0)
        (second,) = finish(runner)
        far.send(b"!")
        (third,) = finish(runner)
    assert [done.lease.lease_id for done in (first, second, third)] == [1, 2, 0]


def test_a_single_turn_is_one_request_for_the_whole_group(make_runner, engine):
    runner = make_runner(SingleTurn())
    runner.submit([lease(3, group_size=5)], min_policy_version=0)
    (done,) = finish(runner)
    (request,) = engine.requests
    assert (request.request_id, request.num_samples, request.sampling) == ("lease-3", 5, WARM)
    assert [trajectory.episode for trajectory in done.trajectories] == [0, 1, 2, 3, 4]


class Raises(SingleTurn):
    async def run(self, prompt, generate, *, group_size):
        return 1 / 0 if prompt.uid == "p0" else await super().run(prompt, generate, group_size=group_size)


class OneIsMissing(SingleTurn):
    async def run(self, prompt, generate, *, group_size):
        return await super().run(prompt, generate, group_size=1 if prompt.uid == "p0" else group_size)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Raises(), "the environment failed: ZeroDivisionError: division by zero"),
        (OneIsMissing(), "the environment gave trajectories of the episodes [0], 2 are wanted"),
    ],
)
def test_an_environment_that_fails_fails_its_prompt_and_no_other(make_runner, environment, message):
    runner = make_runner(environment)
    runner.submit([lease(0), lease(1)], min_policy_version=0)
    errors = {done.lease.lease_id: done.error for done in finish(runner, 2)}
    assert errors == {0: message, 1: None}


def test_what_is_running_at_the_end_is_cancelled_and_aborted(make_runner, engine):
    ended = []

    class Endless(SingleTurn):
        async def run(self, prompt, generate, *, group_size):
            try:
                await generate(prompt.token_ids, num_samples=group_size)
                await asyncio.sleep(3600)
            finally:
                ended.append(prompt.uid)

    runner = make_runner(Endless())
    runner.submit([lease(0)], min_policy_version=0)
    assert runner.take_finished(1.0) == []
    runner.submit([lease(1)], min_policy_version=9)  # of weights that never come
    begin = time.monotonic()
    runner.close()
    assert (sorted(ended), engine.aborted) == (["p0", "p1"], ["lease-1"])
    assert time.monotonic() - begin < 30.0  # of the hour
