"""Test the instruction-following task: what meets a constraint, the score, and the rows of a seed."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_task import (
    KINDS,
    PHRASES,
    SUBJECTS,
    WORDS,
    Row,
    ends_with,
    is_numbered_list,
    make_rows,
    names,
    score,
    split_vocabulary,
    starts_with,
    words_of,
)

from coati_rl.types import Problem
from rewards.own_function import OwnFunctionReward

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "instruction_task.py"
TRAINING, HELD_OUT = make_rows(0, num_train=600, num_eval=180)

# Kind, values, an answer about dogs that meets the constraint, and answers that do not.
EXAMPLES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("word", {"words": ["old"]}, "Dogs get OLD, too.", ["Dogs get older, too.", "Gold dogs are rare."]),
    ("two_words", {"words": ["old", "new"]}, "New dogs, old tricks.", ["Old dogs, old tricks."]),
    ("three_words", {"words": ["old", "new", "blue"]}, "New blue dogs get old.", ["New blue dogs get tired."]),
    (
        "word_twice",
        {"words": ["old"]},
        "Old dogs love old shoes.",
        ["Old dogs love shoes.", "Old, old dogs get old.", "Older dogs love old shoes."],
    ),
    ("first_word", {"word": "Old"}, '"Old" dogs sleep late.', ["Older dogs sleep late.", "The old dogs sleep.", ""]),
    (
        "first_words",
        {"phrase": "Now you know"},
        "Now, you know dogs!",
        ["You know dogs now.", "Now you", "now youknow"],
    ),
    ("title", {}, "<<Dogs>>\nThey run fast.", ["<Dogs>\nThey run fast.", "<<>> Dogs run fast.", "<<Dogs\nrun>> fast"]),
    (
        "numbered_list",
        {"num_items": 2},
        "1. Dogs run.\n\n2. Dogs bark.",
        ["1. Dogs run.", "1. Dogs\n2. run\n3. fast", "1. Dogs run.\n3. Dogs bark.", "Dogs:\n1. Run.\n2. Bark."],
    ),
    ("last_words", {"phrase": "to be honest"}, 'Dogs smell, "to be honest".', ["To be honest, dogs smell.", "honest"]),
    ("no_commas", {}, "Dogs run and bark.", ["Dogs run, and bark."]),
    ("at_most", {"num_words": 5}, "Dogs don't bark at night.", ["Dogs do not bark at night."]),
]


@pytest.mark.parametrize(("kind", "values", "good", "bad"), EXAMPLES, ids=[kind for kind, *_ in EXAMPLES])
def test_a_constraint_is_met_by_what_it_asks_for(kind: str, values: dict[str, Any], good: str, bad: list[str]) -> None:
    assert KINDS[kind].is_met(good, values)
    assert [answer for answer in bad if KINDS[kind].is_met(answer, values)] == []


def test_every_kind_has_an_example() -> None:
    assert [kind for kind, *_ in EXAMPLES] == list(KINDS)


def truth(*constraints: dict[str, Any]) -> str:
    return json.dumps({"subject": "dogs", "constraints": constraints})


def test_the_reward_is_the_share_of_what_was_asked() -> None:
    both = truth({"kind": "no_commas"}, {"kind": "at_most", "num_words": 5})
    assert score("A dog is a friend.", both) == {"reward": 1.0, "answer_correct": True, "detail": ""}
    assert score("A dog, my friend, is not alone.", both) == {
        "reward": pytest.approx(1 / 3),
        "answer_correct": False,
        "detail": "missed: no_commas, at_most",
    }


@pytest.mark.parametrize(
    "answer", ["", "  \n", "dogs", "dogs dogs dogs", "Cats are much better.", "My hotdogs are ready."]
)
def test_an_answer_that_says_nothing_about_the_subject_is_not_correct(answer: str) -> None:
    assert score(answer, truth({"kind": "no_commas"})) == {
        "reward": 0.5,
        "answer_correct": False,
        "detail": "missed: subject",
    }


def test_the_project_calls_the_function_with_the_texts() -> None:
    reward = OwnFunctionReward(f"{SCRIPT}:score")
    problem = Problem(ground_truth=truth({"kind": "no_commas"}))
    good, bad = reward.score(["Dogs run very fast.", "Dogs, as you know, run."], problem)
    assert (good.reward, good.answer_correct, good.verdict) == (1.0, True, "ok")
    assert (bad.reward, bad.answer_correct, bad.verdict) == (0.5, False, "wrong")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(), st.randoms(use_true_random=False))
def test_any_text_is_scored_alike_each_time(answer: str, rng: random.Random) -> None:
    row = rng.choice(TRAINING)
    found = score(answer, row["gt_answer"])
    assert found == score(answer, row["gt_answer"])
    assert 0 <= found["reward"] <= 1
    assert found["answer_correct"] is (found["reward"] == 1)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(WORDS), max_size=8), st.sampled_from(PHRASES))
def test_a_phrase_is_found_at_either_end_whatever_surrounds_it(words: list[str], phrase: str) -> None:
    assert starts_with(f'"{phrase.upper()}", {" ".join(words)}.', phrase)
    assert ends_with(f"{' '.join(words)}: {phrase.title()}!\n", phrase)
    assert starts_with(" ".join(words), phrase) is (words[: len(phrase.split())] == phrase.split())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
def test_a_list_has_as_many_items_as_lines(items: list[str]) -> None:
    answer = "\n".join(f"{number}. {item}" for number, item in enumerate(items, start=1))
    assert [count for count in range(15) if is_numbered_list(answer, count)] == [len(items)]


def test_words_keep_their_apostrophe_and_lose_everything_else() -> None:
    assert words_of("Don't **stop** the 2nd dog-show!") == ["don't", "stop", "the", "2nd", "dog", "show"]


def test_a_seed_gives_the_same_rows_each_time_and_another_one_others() -> None:
    assert make_rows(0, num_train=600, num_eval=180) == (TRAINING, HELD_OUT)
    assert make_rows(1, num_train=600, num_eval=180)[0] != TRAINING


def test_more_training_rows_leave_the_held_out_ones_as_they_are() -> None:
    assert make_rows(0, num_train=10, num_eval=180) == (TRAINING[:10], HELD_OUT)


def elements(rows: list[Row]) -> dict[str, set[str]]:
    """The subjects, words and phrases that the rows are made of, in lower case."""
    found: dict[str, set[str]] = {"subjects": set(), "words": set(), "phrases": set()}
    for row in rows:
        asked = json.loads(row["gt_answer"])
        found["subjects"].add(asked["subject"])
        for values in asked["constraints"]:
            found["words"] |= {word.lower() for word in [*values.get("words", []), values.get("word", "")] if word}
            found["phrases"] |= {values["phrase"].lower()} if "phrase" in values else set()
    return found


def test_training_and_held_out_prompts_have_nothing_in_common_but_the_request_and_the_kinds() -> None:
    training, held_out = elements(TRAINING), elements(HELD_OUT)
    assert all(training.values()) and all(held_out.values())
    assert [name for name in training if training[name] & held_out[name]] == []
    prompts = [row["messages"]["content"] for row in TRAINING + HELD_OUT]
    assert len(set(prompts)) == len(prompts) == 780


def test_the_split_uses_every_element_once() -> None:
    training, held_out = split_vocabulary(random.Random(3))
    for name, values in (("subjects", SUBJECTS), ("words", WORDS), ("phrases", PHRASES)):
        assert sorted([*getattr(training, name), *getattr(held_out, name)]) == sorted(values)
        assert len(set(values)) == len(values)
        assert len(getattr(held_out, name)) == len(values) // 4


def test_constraints_of_a_row_concern_different_aspects_and_kinds_are_equally_frequent() -> None:
    constraints = [[values["kind"] for values in json.loads(row["gt_answer"])["constraints"]] for row in HELD_OUT]
    assert all(len({KINDS[kind].aspect for kind in kinds}) == len(kinds) in (1, 2) for kinds in constraints)
    pairs = sum(len(kinds) == 2 for kinds in constraints)
    assert 0.15 < pairs / len(constraints) < 0.35  # PAIR_FRACTION, give or take three standard errors
    first = [kinds[0] for kinds in constraints]
    assert {first.count(kind) for kind in KINDS} == {len(HELD_OUT) // len(KINDS), len(HELD_OUT) // len(KINDS) + 1}


def test_a_prompt_says_what_is_checked() -> None:
    for row in HELD_OUT:
        asked = json.loads(row["gt_answer"])
        text = row["messages"]["content"]
        assert asked["subject"] in text
        for values in asked["constraints"]:
            assert KINDS[values["kind"]].text.format(**values) in text


def test_no_subject_is_named_by_a_word_a_phrase_or_a_constraint() -> None:
    """Else an answer would name its subject by meeting a constraint."""
    others = " ".join([*WORDS, *PHRASES, *(kind.text for kind in KINDS.values())])
    assert [subject for subject in SUBJECTS if names(others, subject)] == []
    assert set(WORDS).isdisjoint(" ".join([*PHRASES, *SUBJECTS]).split())


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "task"), "--num-train", "600", "--num-eval", "180"]
    subprocess.run([sys.executable, SCRIPT, *arguments], check=True, timeout=60)
    for name, rows in (("train", TRAINING), ("eval", HELD_OUT)):
        lines = (tmp_path / "task" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
