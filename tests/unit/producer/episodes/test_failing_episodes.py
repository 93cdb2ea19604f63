"""Test episodes that fail: they are invalid, counted and closed, and the others of their group go on."""

import asyncio
import itertools
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from producer.environments.chat import ChatTemplate
from producer.environments.episode import EpisodeFailure, Step
from producer.environments.episode_host import ThreadHost
from tests.unit.producer.episodes.talk import Talk


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"best_of": 2}, "sampling 'best_of' of a turn: there is no such field"),
        ({"temperature": float("nan")}, "sampling temperature nan of a turn: use a finite number"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be positive"),
        ({"temperature": 0.0}, "greedy tokens are not trained"),
        ({"temperature": 0.005}, "sampling temperature 0.005 of a turn is below 0.01, the lowest that vLLM samples at"),
        ({"top_p": 0.5}, "train with --old-logprobs trainer"),
        ({"min_p": 0.5}, "of another part of the vocabulary than the run's (0.0); train with --old-logprobs trainer"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 1.1}, "sampling 'repetition_penalty' of a turn: there is no such field"),
        ({"top_k": 1}, "of another part of the vocabulary than the run's (None); train with --old-logprobs trainer"),
    ],
)
def test_sampling_that_cannot_be_done_or_trained_makes_the_sample_invalid(play, sampling, message):
    def step(action):
        return Step(observation="+", done=action.turn == 1, sampling=sampling)

    (done,) = play(lambda: Faulty({"step": step}))
    assert [done.scores[n].verdict for n in (0, 1)] == ["ok", "invalid"]
    assert message in done.scores[1].detail


def test_an_answer_that_the_engine_aborted_makes_its_sample_invalid(play, engine):
    submit, numbers = engine.submit, itertools.count()

    def aborting(request, on_tokens=None):
        future = submit(request)
        if next(numbers) != 2:  # the second answer of an episode
            return future
        result = future.result(30.0)
        ended = Future()
        ended.set_result(
            replace(result, completions=tuple(replace(c, finish_reason="abort") for c in result.completions))
        )
        return ended

    engine.submit = aborting
    (done,) = play(lambda: Talk(turns=2))
    details = sorted(done.scores[episode].detail for episode in (0, 1))
    assert details == ["", "environment: the engine aborted an answer"]


def boom(*_):
    raise KeyError("no such room")


def leave(*_):
    raise SystemExit(3)


def wrong(*_):
    raise EpisodeFailure("the wrong room")


async def late(*_):
    raise ValueError("later")


async def leave_async(*_):
    raise SystemExit(3)


async def leave_in_a_task(*_):
    await asyncio.create_task(leave_async())


async def cancel_itself(*_):
    raise asyncio.CancelledError


def hang(*_):
    time.sleep(1.5)


async def hang_async(*_):
    await asyncio.sleep(60.0)


BROKEN = {
    "reset raises": ({"reset": boom}, "environment: reset raised KeyError: 'no such room'"),
    "step raises": ({"step": boom}, "environment: step raised KeyError: 'no such room'"),
    "step leaves": ({"step": leave}, "environment: step raised SystemExit: 3"),
    "step is async and raises": ({"step": late}, "environment: step raised ValueError: later"),
    "step is async and leaves": ({"step": leave_async}, "environment: step raised SystemExit: 3"),
    "a task of a step leaves": ({"step": leave_in_a_task}, "environment: step raised SystemExit: 3"),
    "step cancels itself": ({"step": cancel_itself}, "environment: step raised CancelledError"),
    "step fails on purpose": ({"step": wrong}, "environment: the wrong room"),
    "step hangs": ({"step": hang}, "environment: step took longer than 0.5 s (--env-timeout)"),
    "step is async and hangs": ({"step": hang_async}, "environment: step took longer than 0.5 s (--env-timeout)"),
    "reset returns a number": ({"reset": lambda _: 3}, "environment: the observation is 3 (int); return text"),
    "step returns nothing": ({"step": lambda _: None}, "environment: step returned None (NoneType); return a Step"),
    "a reward is no number": ({"step": lambda _: ("", "1", True)}, "environment: reward is '1' (str); return a finite"),
    "a reward is NaN": ({"step": lambda _: ("", float("nan"), True)}, "environment: reward is nan (float)"),
    "a reward is too large": ({"step": lambda _: ("", 1e300, True)}, "environment: reward is 1e+300 (float)"),
    "a reward's name is no text": (
        {"step": lambda _: ("", {"\ud800": 1.0}, True)},
        "a name must be text that UTF-8 can hold",
    ),
    "done is text": ({"step": lambda _: ("", 0, "no")}, "environment: done is 'no' (str); return True or False"),
    "info is text": ({"step": lambda _: ("", 0, True, "x")}, "environment: info is 'x' (str); return a dictionary"),
    "text is no text": ({"step": lambda _: ("\ud800", 0, False)}, "environment: the observation is no text that can"),
    "a message lacks a role": ({"step": lambda _: ([{"content": "x"}], 0, False)}, "it needs a role"),
    "a role is unknown": ({"step": lambda _: ([{"role": "user"}, 3], 0, False)}, "environment: the observation is ["),
    "a token is unknown": ({"step": lambda _: ([5000], 0, False)}, "nor of the vocabulary's token ids"),
    "the context is too long": ({"reset": lambda _: "x" * 700}, "its first context has 700 tokens, which leaves none"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_episode_that_fails_is_invalid_and_the_others_of_its_group_go_on(play, broken):
    replaced, message = BROKEN[broken]
    (done,) = play(lambda: Faulty(replaced), timeout_s=0.5 if "hang" in broken else 30.0, group_size=3)
    assert done.error is None
    invalid = done.scores[1]
    assert (invalid.verdict, invalid.reward) == ("invalid", 0.0)
    assert message in invalid.detail
    assert [done.scores[n].verdict for n in (0, 2)] == ["ok", "ok"]
    assert done.records[1]["ended"] == "failed"


class Faulty(Talk):
    """Be broken as episode 1, and well as the others."""

    def __init__(self, replaced):
        super().__init__(turns=2)
        self.replaced = replaced
        if "step" in replaced and asyncio.iscoroutinefunction(replaced["step"]):
            self.step = self.step_async

    def reset(self, task):
        self.is_broken = task.episode == 1
        return self.replaced["reset"](task) if self.is_broken and "reset" in self.replaced else None

    def step(self, action):
        return self.replaced["step"](action) if self.is_broken and "step" in self.replaced else super().step(action)

    async def step_async(self, action):
        return await self.replaced["step"](action) if self.is_broken else super().step(action)


def test_what_was_sampled_before_a_failure_is_kept_and_has_no_part_in_the_loss(play):
    def fails_late(action):
        return boom() if action.turn == 1 else (Talk.observation, 1.0, False)

    (done,) = play(lambda: Faulty({"step": fails_late}))
    assert [len(each.turns) for each in done.trajectories] == [2, 2]
    assert done.scores[1].verdict == "invalid"


def test_a_prompt_fails_if_all_of_its_episodes_do(play):
    (done,) = play(lambda: Talk(step=boom))
    cause = "environment: step raised KeyError: 'no such room'"
    assert done.error == f"all 2 episodes failed, the first one because: {cause}"


@pytest.mark.parametrize("step", [None, boom, hang])
def test_each_episode_is_closed_once_whatever_ends_it(play, step):
    made = []

    def make():
        made.append(Talk(**({"step": step} if step else {})))
        return made[-1]

    play(make, timeout_s=0.3 if step is hang else 30.0)
    deadline = time.monotonic() + 60.0
    while [episode.closed for episode in made] != [1, 1]:  # one that hangs is closed when it comes back
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Slow(Talk):
    """Take longer to be made than a call may."""

    def __init__(self, made):
        super().__init__()
        time.sleep(0.8)
        made.append(self)


class SlowAsync(Slow):
    async def close(self):
        super().close()


@pytest.mark.parametrize("kind", [Slow, SlowAsync])
def test_an_episode_that_is_given_up_in_its_constructor_is_closed_when_it_is_made(play, kind):
    made = []
    (done,) = play(lambda: kind(made), timeout_s=0.2)
    assert "the constructor took longer than 0.2 s" in done.error
    deadline = time.monotonic() + 60.0
    while [episode.closed for episode in made] != [1, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_further_episode_begins_while_too_many_calls_hang(play):
    host = ThreadHost(lambda: Talk(step=hang), timeout_s=0.2, max_stuck=2)
    (done,) = play(None, host=host)
    assert "step took longer" in done.error
    (done,) = play(None, host=host)
    assert "2 calls of the environment hang; --env-isolation process would end them" in done.error


class OneTokenizerError(ChatTemplate):
    """Fail on one text, as a tokenizer might."""

    def encode(self, text):
        if text == "bad":
            raise OverflowError("no such piece")
        return super().encode(text)


def test_a_text_that_the_tokenizer_cannot_take_makes_its_episode_invalid(play, template):
    chat = OneTokenizerError(template._tokenizer)
    (done,) = play(lambda: Faulty({"step": lambda action: ("bad", 0.0, False)}), chat=chat)
    assert [done.scores[n].verdict for n in (0, 1)] == ["ok", "invalid"]
    assert done.scores[1].detail == "environment: OverflowError: no such piece"
