"""Test format rules that are defined as data."""

import time

from rewards.math.answer_format import THINK_ANSWER_TAGS, AnswerFormat, Tag

SCRATCH = AnswerFormat(tags=(Tag(text="<step>", num_occurrences=2), Tag(text="<end>")), description="two steps")


def test_the_rule_of_think_answer_tags_is_one_of_each_tag_in_this_order() -> None:
    rule = [(tag.text, tag.num_occurrences) for tag in THINK_ANSWER_TAGS.tags]
    assert rule == [("<think>", 1), ("</think>", 1), ("<answer>", 1), ("</answer>", 1)]


def test_a_tag_occurs_as_often_as_its_rule_says() -> None:
    assert SCRATCH.is_valid("<step>a<step>b<end>")
    assert not SCRATCH.is_valid("<step>a<end>")
    assert not SCRATCH.is_valid("<step>a<step>b<step>c<end>")


def test_tags_occur_in_the_order_of_the_rule() -> None:
    assert not SCRATCH.is_valid("<step>a<end><step>")


def test_a_response_of_nothing_but_tags_is_judged_in_linear_time() -> None:
    started = time.perf_counter()
    assert not THINK_ANSWER_TAGS.is_valid("<think>" * 100_000 + "<answer" * 100_000)
    assert time.perf_counter() - started < 1.0  # 0.02 s here
