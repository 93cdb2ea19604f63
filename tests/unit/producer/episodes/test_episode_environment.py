"""Test episodes of several turns: what is recorded, how they end, that they do not disturb each other."""

import asyncio
import threading
import time

import pytest

from coati_rl.types import RolloutGroup
from producer.environments.chat import ChatTemplate
from producer.environments.episode import Step
from tests.unit.producer.episodes.talk import Talk


def test_rewards_are_at_the_last_token_of_their_turn_and_add_up_to_the_score(play, template):
    (done,) = play(Talk)
    assert done.error is None
    for episode, trajectory in enumerate(done.trajectories):
        assert [turn.index for turn in trajectory.turns] == [0, 1, 2]
        assert [(r.position, r.name, r.value) for r in trajectory.rewards] == [
            (turn.end - 1, "env", float(turn.index + 1)) for turn in trajectory.turns
        ]
        score = done.scores[episode]
        assert (score.reward, score.answer_correct, score.verdict, score.breakdown) == (6.0, True, "ok", {})
        between = trajectory.token_ids[trajectory.turns[0].end : trajectory.turns[1].start].tolist()
        assert template.decode(between).endswith("user\nmore<|endoftext|>\n<|im_start|>assistant\n")
        assert trajectory.loss_mask.sum() == sum(turn.end - turn.start for turn in trajectory.turns)


def test_rewards_by_name_are_added_up_by_name(play):
    class Named(Talk):
        def step(self, action):
            return Step(observation="+", reward={"form": 0.25, "fact": -1.0}, done=action.turn == 1)

    (done,) = play(Named)
    assert done.scores[0].reward == -1.5
    assert done.scores[0].breakdown == {"form": 0.5, "fact": -2.0}
    assert not done.scores[0].answer_correct


def test_the_record_says_who_spoke_and_for_how_long(play):
    (done,) = play(lambda: Talk(turns=2))
    record = done.records[1]
    assert record["ended"] == "done"
    assert [turn["role"] for turn in record["turns"]] == ["prompt", "assistant", "user", "assistant"]
    answers = record["turns"][1::2]
    assert [turn["info"] for turn in answers] == [{"turn": 0}, {"turn": 1}]
    assert all(turn["seconds"] >= 0 and turn["environment_seconds"] >= 0 for turn in answers)
    tokens = done.trajectories[1]
    assert sum(turn["tokens"] for turn in record["turns"]) == len(tokens.token_ids)


@pytest.mark.parametrize(("limits", "ending"), [({"max_turns": 2}, "turns"), ({"max_tokens": 100}, "tokens")])
def test_an_episode_that_a_limit_ends_is_a_truncated_sample(play, engine, limits, ending):
    (done,) = play(lambda: Talk(turns=99), **limits)
    trajectory = done.trajectories[0]
    assert done.records[0]["ended"] == ending
    assert (trajectory.finish_reason, done.scores[0].verdict) == ("length", "ok")
    assert all(len(request.token_ids) < limits.get("max_tokens", 600) for request in engine.requests)


def test_an_answer_that_ends_by_itself_is_truncated_if_the_limit_of_turns_ends_the_episode(play, lease_of):
    def finish_reasons(**limits):
        lease = lease_of(group_size=8, max_new_tokens=400)
        (done,) = play(lambda: Talk(turns=1 if not limits else 99), leases=[lease], **limits)
        return [trajectory.finish_reason for trajectory in done.trajectories]

    assert "stop" in finish_reasons()
    assert finish_reasons(max_turns=1) == ["length"] * 8


@pytest.mark.parametrize(
    ("first", "begins"),
    [
        (None, "<|im_start|>user\nq<|endoftext|>\n<|im_start|>assistant\n"),
        ("raw", "raw"),
        ([{"role": "system", "content": "be"}], "<|im_start|>system\nbe<|endoftext|>\n<|im_start|>assistant\n"),
        ([5, 6, 7], None),
    ],
)
def test_an_episode_begins_with_the_row_or_with_what_reset_returns(play, template, first, begins):
    (done,) = play(lambda: Talk(turns=1, reset=lambda task: first))
    trajectory = done.trajectories[0]
    given = trajectory.token_ids[: trajectory.turns[0].start].tolist()
    assert given == [5, 6, 7] if begins is None else template.decode(given) == begins


@pytest.mark.parametrize(
    ("observation", "text"),
    [("raw", "raw"), ([5, 6, 7], None), (None, ""), ([], ""), ({"role": "user", "content": "x"}, "x")],
)
def test_what_the_policy_reads_next_is_text_messages_tokens_or_nothing(play, template, observation, text):
    (done,) = play(lambda: Talk(step=lambda action: (observation, 0.0, action.turn == 1)))
    first, second = done.trajectories[0].turns
    between = done.trajectories[0].token_ids[first.end : second.start].tolist()
    if text is None:
        assert between == [5, 6, 7]
    elif text == "x":
        assert "<|im_start|>user\nx" in template.decode(between)
    else:
        assert template.decode(between) == text


def test_a_task_holds_the_row_and_a_seed_that_its_episodes_share(play, lease_of):
    seen = []
    leases = [lease_of(0, columns={"level": 3}), lease_of(1, purpose="eval", group_size=1)]
    play(lambda: Talk(turns=1, reset=seen.append), leases=leases)
    first, second, evaluated = sorted(seen, key=lambda task: (task.uid, task.episode))
    assert (first.uid, first.ground_truth, first.columns, first.purpose) == ("p0", "4", {"level": 3}, "train")
    assert first.messages == ({"role": "user", "content": "q"},)
    assert first.prompt.startswith("<|im_start|>user")
    assert (first.episode, second.episode, evaluated.purpose) == (0, 1, "eval")
    assert first.seed == second.seed != evaluated.seed
    assert 0 <= first.seed < 2**31


def test_an_action_holds_the_conversation_with_the_answer_last(play):
    seen = []

    def step(action):
        seen.append(action)
        return Talk.observation, 0.0, action.turn == 1

    play(lambda: Talk(step=step), group_size=1)
    assert [action.turn for action in seen] == [0, 1]
    assert [message["role"] for message in seen[1].messages] == ["user", "assistant", "user", "assistant"]
    assert seen[1].messages[-1]["content"] == seen[1].text
    assert seen[1].messages[1]["content"] == seen[0].text
    assert len(seen[0].token_ids) >= 1


def test_an_episode_whose_conversation_is_rendered_anew_has_forks_of_its_own_trajectories(play, tokenizer):
    """The tokenizer's own template writes no end of a turn, so that no answer with one is continued."""
    (done,) = play(Talk, chat=ChatTemplate(tokenizer), group_size=3)
    group = RolloutGroup(
        lease_id=0,
        producer_id=0,
        prompt=done.lease.prompt,
        temperature=0.7,
        trajectories=done.trajectories,
        scores=tuple(done.scores[episode] for episode in range(3)),
    )
    parents = [(each.episode, each.prefix.parent) for each in group.trajectories]
    of_parents = [group.trajectories[parent].episode for _, parent in parents if parent is not None]
    assert len(of_parents) >= 3
    assert of_parents == [episode for episode, parent in parents if parent is not None]
    assert any(turn.get("is_fork") for turn in done.records[0]["turns"])


def test_of_an_episode_with_forks_that_a_limit_ends_the_last_answer_is_truncated(play, tokenizer):
    (done,) = play(lambda: Talk(turns=99), chat=ChatTemplate(tokenizer), max_turns=3)
    for episode in (0, 1):
        parts = [each for each in done.trajectories if each.episode == episode]
        last = max((turn for each in parts for turn in each.turns), key=lambda turn: turn.index)
        assert (last.index, last.finish_reason, parts[-1].turns[-1]) == (2, "length", last)
    assert len(done.trajectories) > 2, "there are forks"


def test_a_turn_of_an_evaluation_may_be_greedy(play, lease_of, engine):
    def step(action):
        return Step(observation="+", done=action.turn == 1, sampling={"temperature": 0.0})

    (done,) = play(lambda: Talk(step=step), leases=[lease_of(purpose="eval")])
    assert [done.scores[episode].verdict == "invalid" for episode in (0, 1)] == [False, False]
    assert sorted(request.sampling.temperature for request in engine.requests) == [0.0, 0.0, 0.7, 0.7]


def test_the_next_turn_is_sampled_as_the_step_says(play, engine):
    sampling = {"temperature": 1.5, "max_new_tokens": 3, "stop": ["a", "b"], "seed": 77}

    def step(action):
        return Step(observation="+", done=action.turn == 2, sampling=sampling if action.turn == 0 else None)

    (done,) = play(lambda: Talk(step=step), group_size=1)
    first, second, third = [request.sampling for request in engine.requests]
    assert (second.temperature, second.max_new_tokens, second.stop, second.seed) == (1.5, 3, ("a", "b"), 77)
    assert (first.temperature, third.temperature, third.max_new_tokens) == (0.7, 0.7, 12)
    trajectory = done.trajectories[0]
    ends = [turn.end - turn.start for turn in trajectory.turns]
    assert trajectory.temperature.tolist() == pytest.approx([0.7] * ends[0] + [1.5] * ends[1] + [0.7] * ends[2])


@pytest.mark.parametrize(("purpose", "cause"), [("train", "temperature 0 of a training turn"), ("eval", None)])
def test_the_first_turn_is_sampled_as_reset_says(play, engine, purpose, cause):
    def reset(task):
        assert task.sampling == {
            "temperature": 0.7, "top_p": 1.0, "top_k": None, "min_p": 0.0, "max_new_tokens": 12, "stop": ()
        }  # fmt: skip
        return Step(sampling={"temperature": 0, "max_new_tokens": 3})

    (done,) = play(lambda: Talk(turns=2, reset=reset), group_size=1, purpose=purpose)
    if cause is not None:
        assert cause in done.error
        return
    first, second = [request.sampling for request in engine.requests]
    assert (first.temperature, first.max_new_tokens, second.temperature, second.max_new_tokens) == (0, 3, 0.7, 12)
    (trajectory,) = done.trajectories
    assert trajectory.temperature.tolist()[:1] == [0.0]


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (Step(done=True, filter_score=float("nan")), "filter_score is nan"),
        (Step(done=True, metrics={"a": "text"}), "metric 'a' is 'text'"),
        (Step(done=True, metrics={"\ud800": 1.0}), "a name must be text that UTF-8 can hold"),
    ],
)
def test_a_score_or_a_metric_that_is_no_number_makes_the_episode_invalid(play, step, cause):
    (done,) = play(lambda: Talk(step=lambda action: step), group_size=1)
    assert cause in done.error


def test_a_score_says_what_is_correct_and_what_is_filtered_and_the_last_step_counts(play):
    def step(action):
        score, metrics = (0.5, {"a": 1}) if action.turn else (1.0, {"a": 2, "b": 3})
        return Step(reward=4.0, done=action.turn == 1, filter_score=score, metrics=metrics)

    (done,) = play(lambda: Talk(step=step), group_size=1)
    score = done.scores[0]
    assert (score.reward, score.filter_score, score.answer_correct, score.verdict) == (8.0, 0.5, False, "wrong")
    assert (done.records[0]["filter_score"], done.records[0]["metrics"]) == (0.5, {"a": 1.0})


def test_64_episodes_at_once_sample_what_64_one_after_another_do(play, lease_of):
    class Slow(Talk):
        def step(self, action):
            time.sleep(0.02 * (hash(action.text) % 3))
            return super().step(action)

    leases = [lease_of(number, group_size=4, seed=number) for number in range(16)]
    together = play(lambda: Slow(turns=3), leases=leases)
    alone = play(lambda: Talk(turns=3), leases=leases, at_once=False)
    for one, other in zip(together, alone, strict=True):
        assert [t.token_ids.tolist() for t in one.trajectories] == [t.token_ids.tolist() for t in other.trajectories]
        assert [t.logprobs.tolist() for t in one.trajectories] == [t.logprobs.tolist() for t in other.trajectories]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_tools_that_take_long_are_waited_for_at_the_same_time(play, lease_of, is_async):
    """64 episodes of 2 turns of 0.25 s: 0.5 s in all, and 32 s one after another."""
    threads = set()

    class Sleeps(Talk):
        def step(self, action):
            threads.add(threading.get_ident())
            time.sleep(0.25)
            return super().step(action)

    class SleepsAsync(Talk):
        async def step(self, action):
            await asyncio.sleep(0.25)
            return Talk.step(self, action)

    make = SleepsAsync if is_async else Sleeps
    leases = [lease_of(number, group_size=8) for number in range(8)]
    begin = time.monotonic()
    finished = play(lambda: make(turns=2), leases=leases)
    assert all(done.error is None for done in finished)
    assert time.monotonic() - begin < 16.0  # far from 32, also where other programs have the cores
    assert len(threads) == (0 if is_async else 64)


def test_an_episode_that_has_ended_holds_no_update_up_while_another_has_not_begun(play, engine, monkeypatch):
    """The other's first request would wait for the update, which would wait for the group to end."""
    closed, close = threading.Event(), engine.close_episode

    def close_and_tell(episode_id):
        close(episode_id)
        closed.set()

    class Late(Talk):
        def reset(self, task):
            assert task.episode == 0 or closed.wait(60)
            return super().reset(task)

    monkeypatch.setattr(engine, "close_episode", close_and_tell, raising=False)
    (done,) = play(Late)
    assert [score.verdict for score in done.scores.values()] == ["ok", "ok"]
