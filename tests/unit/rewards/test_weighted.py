"""Test several rewards in one: their sum, their parts, and what the first one decides."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from coati_rl.errors import ConfigError
from coati_rl.types import Problem, Score
from rewards.reward import ResponseReward, Reward, invalid_score, warm_up
from rewards.weighted import WeightedPart, WeightedReward, load_combine

PROBLEM = Problem(ground_truth="4")


def scoring(response: str, ground_truth: str) -> Score:
    """The response says what it scores: `1`, `0.5`; `?` cannot be decided."""
    if response == "?":
        return invalid_score("no idea")
    reward = float(response)
    is_right = reward >= 1
    verdict = "ok" if is_right else "wrong"
    return Score(
        reward=reward, answer_correct=is_right, format_valid=reward != 0, verdict=verdict, detail=f"scored {response}"
    )


class Length:
    """A reward of the whole group: the length of each response; noted beside it, the group's size."""

    is_batch = True

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        for response in responses:
            yield Score(
                reward=float(len(response)),
                answer_correct=True,
                format_valid=True,
                verdict="ok",
                breakdown={"group": float(len(responses))},
            )


def weighted(*parts: tuple[str, float, Reward]) -> WeightedReward:
    return WeightedReward([WeightedPart(name=name, weight=weight, reward=reward) for name, weight, reward in parts])


def test_the_reward_is_the_weighted_sum_and_the_first_part_decides_the_rest() -> None:
    reward = weighted(("answer", 2.0, ResponseReward(scoring)), ("length", -0.5, Length()))
    right, wrong = reward.score(["1", "0.25"], PROBLEM)
    assert right == Score(
        reward=1.5,  # 2 * 1 - 0.5 * 1
        answer_correct=True,
        format_valid=True,
        verdict="ok",
        detail="scored 1",
        breakdown={"answer": 1.0, "length": 1.0, "length/group": 2.0},
        filter_score=1.0,
    )
    assert (wrong.reward, wrong.verdict, wrong.detail) == (-1.5, "wrong", "scored 0.25")  # 2 * 0.25 - 0.5 * 4
    assert wrong.breakdown == {"answer": 0.25, "length": 4.0, "length/group": 2.0}
    assert wrong.filter_score == 0.25, "what the first reward says of the answer, not the sum"


def test_a_score_of_its_own_for_the_filter_is_kept_if_the_first_reward_has_one() -> None:
    class Graded:
        is_batch = False

        def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
            for response in responses:
                yield replace(scoring(response, ""), filter_score=0.5)

    for parts in itertools.permutations([("graded", 1.0, Graded()), ("answer", 1.0, ResponseReward(scoring))]):
        (score,) = weighted(*parts).score(["1"], PROBLEM)
        assert score.filter_score == (0.5 if parts[0][0] == "graded" else 1.0)


def test_a_sum_that_is_too_large_to_train_on_is_invalid() -> None:
    (score,) = weighted(("answer", 1e300, ResponseReward(scoring)), ("length", 1.0, Length())).score(["1"], PROBLEM)
    assert score.verdict == "invalid"
    assert score.detail == "a reward of 1e+300 cannot be trained on; return at most 1e+09 in size"


def test_a_weight_of_0_only_reports() -> None:
    (score,) = weighted(("length", 0.0, Length()), ("answer", 1.0, ResponseReward(scoring))).score(["0.5"], PROBLEM)
    assert (score.reward, score.verdict) == (0.5, "ok"), "what is right is still the first part's to say"
    assert score.breakdown["length"] == 3.0


def test_if_any_part_cannot_decide_the_score_is_invalid_and_names_the_part() -> None:
    reward = weighted(
        ("length", 1.0, Length()), ("a", 1.0, ResponseReward(scoring)), ("b", 0.0, ResponseReward(scoring))
    )
    first, second = reward.score(["?", "1"], PROBLEM)
    assert (first.verdict, first.reward, first.detail) == ("invalid", 0.0, "a: no idea; b: no idea")
    assert second.verdict == "ok"


@pytest.mark.parametrize(
    ("parts", "is_batch", "is_fast"),
    [
        ([ResponseReward(scoring)], False, True),
        ([ResponseReward(scoring), ResponseReward(scoring)], False, True),
        ([ResponseReward(scoring), Length()], True, False),
    ],
)
def test_one_part_that_needs_the_group_or_is_slow_is_enough(parts: list[Reward], is_batch: bool, is_fast: bool) -> None:
    reward = weighted(*((f"part {index}", 1.0, part) for index, part in enumerate(parts)))
    assert (reward.is_batch, reward.is_fast) == (is_batch, is_fast)


def test_it_is_concurrent_if_one_part_is_and_only_computes_if_all_do_and_no_function_of_the_user_combines() -> None:
    class Asks(ResponseReward):
        is_concurrent = True
        only_computes = False

    asks, computes = Asks(scoring), ResponseReward(scoring)
    assert weighted(("a", 1.0, asks), ("b", 1.0, computes)).is_concurrent
    assert not weighted(("a", 1.0, computes)).is_concurrent
    parts = [WeightedPart(name=name, weight=1.0, reward=computes) for name in "ab"]
    assert WeightedReward(parts).only_computes
    assert not WeightedReward(parts, combine=lambda rewards: 0.0).only_computes
    assert not weighted(("a", 1.0, asks), ("b", 1.0, computes)).only_computes


def test_all_parts_are_warmed_up() -> None:
    seen = []

    def noting(response: str, ground_truth: str) -> Score:
        seen.append(response)
        return invalid_score("")

    warm_up(weighted(("length", 1.0, Length()), ("noting", 1.0, ResponseReward(noting))))
    assert seen


@pytest.fixture
def combine(tmp_path):
    """(the source of a function, the names of the rewards) -> the function, loaded as --reward-combine."""
    numbers = itertools.count()

    def load(source, names=("answer", "length")):
        file = tmp_path / f"mine{next(numbers)}.py"
        file.write_text(source, encoding="utf-8")
        return load_combine(f"{file}:combine", names)

    return load


def combined(function, *responses: str) -> list[Score]:
    parts = [
        WeightedPart(name="answer", weight=2.0, reward=ResponseReward(scoring)),
        WeightedPart(name="length", weight=-0.5, reward=Length()),
    ]
    return [*WeightedReward(parts, function).score(responses, PROBLEM)]


def test_a_function_makes_the_reward_from_the_breakdown_and_the_first_part_decides_the_rest(combine) -> None:
    function = combine("def combine(r): return r['answer'] * r['length'] + r['length/group']")
    (score,) = combined(function, "1.5")
    assert (score.reward, score.answer_correct, score.filter_score) == (1.5 * 3 + 1, True, 1.5)
    assert score.breakdown == {"answer": 1.5, "length": 3.0, "length/group": 1.0}


def test_rl4llms_example_computes_with_numbers_as_with_tensors(combine) -> None:
    source = "import torch\ndef combine(d): return torch.tensor(0.7) * d['answer'] + 0.3 * d['length']"
    assert [score.reward for score in combined(combine(source), "1")] == [pytest.approx(1.0)]


def test_a_combination_that_fails_on_a_response_is_invalid(combine) -> None:
    broken = combine("def combine(r): return 1 / (r['answer'] - 0.5)")
    (score,) = combined(broken, "0.5")
    assert (score.verdict, score.detail.partition(": ")[0]) == ("invalid", "--reward-combine")
    assert "ZeroDivisionError" in score.detail
    nothing = combine("def combine(r): return 1.0 if r['answer'] == 0 else None")
    assert combined(nothing, "1")[0].detail == "--reward-combine returned None; return a finite number"
    assert combined(combine("def combine(r): return 2.0"), "?")[0].detail == "answer: no idea", "undecided stays so"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def combine(r): return r['anwser']", "fails on rewards of 0: KeyError: 'anwser'; it is called with a"),
        ("def combine(r): return r['answr/group']", "fails on rewards of 0: KeyError: 'answr/group'"),
        ("def combine(a, b): return a", "fails on rewards of 0: TypeError"),
        ("def combine(r): return 'good'", "returned 'good'; return a finite number"),
        ("combine = 1", "has no function 'combine'"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_at_the_start(combine, source, message) -> None:
    with pytest.raises(ConfigError) as caught:
        combine(source)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--reward-combine ")
