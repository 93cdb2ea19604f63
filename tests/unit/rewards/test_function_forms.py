"""Test the reward functions of TRL, verl and RL4LLM: recognised by their parameters, and called as there."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardColumns
from coati_rl.types import Problem
from rewards.own_function import OwnFunctionReward
from rewards.registry import columns_of

ROW = {"solution": "4", "difficulty": 2, "data_source": "sums", "extra_info": {"split": "train"}}
MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
PROBLEM = Problem(uid="train-3", ground_truth="4", messages=MESSAGES, prompt="2+2?", columns=ROW)
PLAIN = Problem(uid="train-4", ground_truth="4", prompt="2+2=", columns=ROW)


@pytest.fixture
def own(tmp_path: Path):
    """The source of a file with a function or class `score` -> the reward; a file is imported once in a process."""
    numbers = itertools.count()

    def make(source: str) -> OwnFunctionReward:
        file = tmp_path / f"mine{next(numbers)}.py"
        file.write_text(source, encoding="utf-8")
        return OwnFunctionReward(f"{file}:score")

    return make


def scores_of(reward, *responses, problem=PROBLEM):
    scores = [*reward.score(responses, problem)]
    assert [score.detail for score in scores if score.verdict == "invalid"] == []
    return scores


def rewards_of(reward, *responses, problem=PROBLEM):
    return [score.reward for score in scores_of(reward, *responses, problem=problem)]


def test_trls_form_gets_conversations_and_a_column_by_name(own) -> None:
    reward = own(
        "def score(prompts, completions, solution, **kwargs):\n"
        "    assert prompts[0][1] == {'role': 'user', 'content': '2+2?'} and len(prompts) == 2\n"
        "    assert [*kwargs] == ['difficulty', 'data_source', 'extra_info'] and kwargs['difficulty'] == [2, 2]\n"
        "    return [float(each[0]['content'] == truth) for each, truth in zip(completions, solution)]\n"
    )
    assert (reward.is_batch, reward.needs_truth) == (True, False)
    assert reward.columns == RewardColumns(required=("solution",), are_kept=True)
    assert rewards_of(reward, "4", "5") == [1.0, 0.0]


def test_trls_form_gets_texts_for_a_prompt_of_plain_text(own) -> None:
    reward = own(
        "def score(completions, prompts, difficulty=1):\n"
        "    assert prompts == ['2+2='] * 2 and difficulty == [2, 2]\n"
        "    return [len(completion) for completion in completions]\n"
    )
    assert reward.columns == RewardColumns(are_kept=True)
    assert rewards_of(reward, "4", "four", problem=PLAIN) == [1.0, 4.0]


def test_trls_example_of_kwargs_alone_and_an_async_one(own) -> None:
    lengths = own("def score(completions, **kwargs): return [len(each[0]['content']) for each in completions]")
    assert rewards_of(lengths, "four") == [4.0]
    assert rewards_of(own("async def score(completions): return [0.5 for _ in completions]"), "4") == [0.5]


def test_a_row_whose_prompt_is_text_has_texts_for_completions_in_trls_form(own) -> None:
    problem = replace(PROBLEM, columns={"prompt": "2+2=", "solution": "4"})
    reward = own(
        "def score(prompts, completions): return [(p, c) == ('2+2=', '4') for p, c in zip(prompts, completions)]"
    )
    assert rewards_of(reward, "4", "5", problem=problem) == [1.0, 0.0]
    messages = replace(PROBLEM, columns={"prompt": "2+2=", "messages": [*MESSAGES]})
    conversations = own("def score(completions): return [each[0]['content'] == '4' for each in completions]")
    assert rewards_of(conversations, "4", problem=messages) == [1.0]


def test_none_of_trls_form_is_an_invalid_sample(own) -> None:
    good, none = own("def score(completions): return [1.0, None]").score(["4", "5"], PROBLEM)
    assert (good.reward, none.verdict) == (1.0, "invalid")


def test_verls_form_gets_texts_and_the_columns_of_its_rows(own) -> None:
    reward = own(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, extra_info) == ('sums', {'split': 'train'})\n"
        "    return solution_str == ground_truth\n"
    )
    assert (reward.is_batch, reward.needs_truth) == (False, True)
    assert reward.columns == RewardColumns(required=("data_source",), are_kept=True)
    assert rewards_of(reward, "4", "5") == [1.0, 0.0]


def test_verls_dictionary_has_score_and_acc(own) -> None:
    (score,) = scores_of(
        own("def score(solution_str, ground_truth, **kwargs): return {'score': -0.5, 'acc': True, 'length': 7}"), "4"
    )
    assert (score.reward, score.answer_correct, score.breakdown) == (-0.5, True, {"length": 7.0})


RL4LLM = """
class BaseRewardFunction:  # as rl4llm.core.base_env has it
    def __init__(self, name): self.name = name

class score(BaseRewardFunction):
    def __init__(self, name='accuracy', **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        assert messages[-1].role == 'assistant' and messages[0]['content'] == 'Be brief.'
        return 0.5 * (messages[-1].content == ground_truth) + kwargs['difficulty']
"""


def test_rl4llms_class_is_made_and_called_with_messages_that_have_attributes(own) -> None:
    reward = own(RL4LLM)
    assert (reward.needs_truth, reward.columns) == (True, RewardColumns(are_kept=True))
    assert rewards_of(reward, "4", "5") == [2.5, 2.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class score:\n    def __init__(self, tokenizer): pass", "the class cannot be made without arguments"),
        ("class score: pass", "the class has no __call__"),
        ("def score(completions, completion_ids): return []", "takes (completions, completion_ids); a reward function"),
        ("def score(prompts, completions, *rest): return []", "takes (prompts, completions, *rest)"),
        ("def score(solution_str, ground_truth, tolerance): return 1", "takes (solution_str, ground_truth, tolerance)"),
        ("def score(messages, ground_truth, judge): return 1", "takes (messages, ground_truth, judge)"),
    ],
)
def test_what_cannot_be_called_is_refused(own, source: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(source)
    assert message in str(caught.value)


def test_two_texts_with_the_conversation_besides_are_no_other_form(own) -> None:
    assert rewards_of(own("def score(response, ground_truth, messages=None): return messages is None"), "4") == [1.0]


def test_columns_are_those_of_all_functions_of_a_reward_type(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(completions, solution): return []\ndef g(response): return 1\n")
    assert columns_of(f"boxed=1,{tmp_path}/a.py:g=1") == RewardColumns()
    assert columns_of(f"boxed=1,{tmp_path}/a.py:g=1,{tmp_path}/a.py:f=1").required == ("solution",)
