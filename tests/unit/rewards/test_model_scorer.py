"""Test the scores of a reward model, alone and in a sum with other rewards."""

from concurrent.futures import Future

import pytest

from coati_rl.types import Problem, Score
from rewards.combined_scorer import CombinedScorer
from rewards.model.judgement import Judgement
from rewards.model.model_scorer import ModelScorer
from rewards.weighted import Combination

PROBLEM = Problem(ground_truth="2", messages=({"role": "user", "content": "1+1?"},))


class Client:
    """Answers with these judgements, or with an error; keeps what it was asked."""

    def __init__(self, *judgements, error=None):
        self.judgements, self.error, self.asked, self.is_closed = list(judgements), error, [], False

    def submit(self, conversations):
        self.asked += conversations
        future = Future()
        if self.error is None:
            future.set_result(self.judgements)
        else:
            future.set_exception(self.error)
        return future

    def close(self):
        self.is_closed = True


def scores_of(client, *responses, problem=PROBLEM, **options):
    return ModelScorer(client, **options).submit(responses, problem).result(timeout=0)


def test_a_reward_is_correct_from_the_bound_on_and_its_conversation_is_the_rows():
    client = Client(Judgement(reward=0.25), Judgement(reward=-3.0))
    good, bad = scores_of(client, "2", "3", correct_from=0.25)
    assert good == Score(
        reward=0.25, answer_correct=True, format_valid=True, verdict="ok", detail="the reward model: 0.25"
    )
    assert (bad.reward, bad.answer_correct, bad.verdict) == (-3.0, False, "wrong")
    assert [(each.messages, each.response) for each in client.asked] == [
        (PROBLEM.messages, "2"),
        (PROBLEM.messages, "3"),
    ]


@pytest.mark.parametrize(
    ("client", "detail"),
    [
        (Client(Judgement(problem="70 tokens, more than 64")), "the reward model: 70 tokens, more than 64"),
        (Client(Judgement(reward=float("nan"))), "the reward model: nan"),
        (Client(error=OSError("gone")), "the reward model: gone"),
    ],
)
def test_a_failure_is_invalid_and_never_a_zero(client, detail):
    (score,) = scores_of(client, "2")
    assert (score.verdict, score.detail) == ("invalid", detail)


def test_without_a_question_the_model_is_not_asked():
    client = Client()
    (score,) = scores_of(client, "", problem=Problem(ground_truth="0"))
    assert (score.verdict, client.asked) == ("invalid", [])


class Fixed:
    """Scores by rewards given beforehand, when it is told to."""

    def __init__(self, *rewards):
        self.rewards, self.future, self.is_closed = rewards, Future(), False

    def submit(self, responses, problem):
        return self.future

    def finish(self):
        self.future.set_result(
            [Score(reward=each, answer_correct=each > 0, format_valid=True, verdict="ok") for each in self.rewards]
        )

    def close(self):
        self.is_closed = True


def test_a_sum_is_ready_with_its_last_part_in_any_order():
    model, pool = Fixed(2.0, -1.0), Fixed(0.0, 1.0)
    scorer = CombinedScorer([pool, model], Combination({"boxed": 1.0, "judge": 0.5}))
    combined = scorer.submit(["2", "3"], PROBLEM)
    model.finish()
    assert not combined.done()
    pool.finish()
    assert [score.reward for score in combined.result(timeout=0)] == [1.0, 0.5]
    assert combined.result()[0].breakdown == {"boxed": 0.0, "judge": 2.0}
    assert combined.result()[0].answer_correct is False, "the first reward says what is right"
    scorer.close()
    assert model.is_closed and pool.is_closed


def test_a_part_that_fails_fails_the_sum():
    model, pool = Fixed(1.0), Fixed(1.0)
    combined = CombinedScorer([pool, model], Combination({"boxed": 1.0, "judge": 0.5})).submit(["2"], PROBLEM)
    pool.future.set_exception(OSError("no worker"))
    model.finish()
    with pytest.raises(OSError, match="no worker"):
        combined.result(timeout=0)
