"""Generate instructions whose fulfilment a program can check, and check answers: the task of scripts/real_model.sh.

    python scripts/instruction_task.py OUT_DIR --seed 0     # writes OUT_DIR/train.jsonl and OUT_DIR/eval.jsonl
    rl_example.py -d OUT_DIR/train.jsonl -rt scripts/instruction_task.py:score ...

A prompt asks for a sentence about a subject, under one or two constraints of the kinds of IFEval (arXiv:2311.07911):
words to use, how the answer starts and ends, its form, commas, its length. The ground truth of a row is JSON: the
subject, and kind and values of each constraint. No subject, word or phrase of a held-out row is in a training row.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = Mapping[str, Any]  # of a constraint: what its prompt names
Row = dict[str, Any]

MIN_WORDS = 4  # of an answer: an empty one would meet every constraint that forbids something
HELD_OUT_FRACTION = 0.25  # of the subjects, words and phrases
PAIR_FRACTION = 0.25  # of the rows: two constraints

_SUBJECTS = """
apples bees books bread bridges cameras candles cats chess chocolate clocks clouds coffee corn cows dancing
deserts dogs dolphins dragons eagles elephants farmers fish flowers forests frogs gardens ghosts gold grass
guitars hats honey horses houses ice islands kites lakes lemons lions maps milk mirrors money monkeys
mountains museums music oceans onions owls paintings penguins pianos pirates pizza planets rain rice rivers
robots roses salt schools ships shoes singing sleep snakes snow soap soccer spiders spring stars stones storms
sugar swimming tea teachers tigers trains trees turtles water whales windows winter
"""
_WORDS = """
always amazing ancient beautiful blue bright children colors dark early easy famous fast free friends green
happy hidden home important large light little magic many morning nature never new night often old peace
people perfect popular quiet rare simple small smart soft special strange strong summer sweet tall today
together useful warm white wild world young
"""
SUBJECTS, WORDS = tuple(_SUBJECTS.split()), tuple(_WORDS.split())
PHRASES = (
    "and that is all",
    "as we all know",
    "believe it or not",
    "day after day",
    "do you agree",
    "every single day",
    "for a long time",
    "from time to time",
    "in my opinion",
    "in the end",
    "is that not great",
    "just like that",
    "let me tell you",
    "more than ever",
    "no matter what",
    "now you know",
    "of all things",
    "once and for all",
    "over and over again",
    "that is my answer",
    "there is no doubt",
    "this is the end",
    "to be honest",
    "without any doubt",
)
REQUESTS = (
    "Write one sentence about {subject}.",
    "Tell me one fact about {subject}.",
    "Describe {subject} in one sentence.",
    "Say something nice about {subject}.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Hold what prompts are made of; training and held-out prompts have one each, without common elements."""

    subjects: Sequence[str]
    words: Sequence[str]
    phrases: Sequence[str]


Draw = Callable[[random.Random, Vocabulary], Values]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Hold a kind of constraint."""

    text: str  # of the prompt, with values in braces
    aspect: str  # of an answer; two constraints of a row are of different aspects
    is_met: Callable[[str, Values], bool]  # of the stripped answer
    draw: Draw = lambda rng, vocabulary: {}
    requests: Sequence[str] = REQUESTS  # that go with it


def words_of(answer: str) -> list[str]:
    """Return the words of an answer, in lower case."""
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", answer.lower())


def lines_of(answer: str) -> list[str]:
    """Return the lines of an answer that are not blank."""
    return [line.strip() for line in answer.splitlines() if line.strip()]


def names(answer: str, subject: str) -> bool:
    """Return True if an answer has the subject as a word, in the plural or the singular, with or without 's."""
    return not {subject, subject.removesuffix("s")}.isdisjoint(word.partition("'")[0] for word in words_of(answer))


def has_words(answer: str, words: Sequence[str]) -> bool:
    """Return True if an answer has all of the words, each as a word of its own."""
    return set(words) <= set(words_of(answer))


def starts_with(answer: str, phrase: str) -> bool:
    """Return True if an answer starts with a phrase; case and what is not a letter do not count."""
    wanted = words_of(phrase)
    return words_of(answer)[: len(wanted)] == wanted


def ends_with(answer: str, phrase: str) -> bool:
    """Return True if an answer ends with a phrase; case and what is not a letter do not count."""
    wanted = words_of(phrase)
    return words_of(answer)[-len(wanted) :] == wanted


def has_title(answer: str) -> bool:
    """Return True if an answer has a title in double angle brackets."""
    return re.search(r"<<[^<>\n]+>>", answer) is not None


def is_numbered_list(answer: str, num_items: int) -> bool:
    """Return True if an answer is nothing but lines numbered from 1 to `num_items`."""
    lines = lines_of(answer)
    numbered = [re.match(rf"{number}\. *\w", line) is not None for number, line in enumerate(lines, start=1)]
    return len(numbered) == num_items and all(numbered)


def draw_words(count: int) -> Draw:
    """Return a function that draws `count` different words."""
    return lambda rng, vocabulary: {"words": rng.sample(vocabulary.words, count)}


KINDS = {
    "word": Kind(
        text='Use the word "{words[0]}".',
        aspect="words",
        draw=draw_words(1),
        is_met=lambda answer, values: has_words(answer, values["words"]),
    ),
    "two_words": Kind(
        text='Use the words "{words[0]}" and "{words[1]}".',
        aspect="words",
        draw=draw_words(2),
        is_met=lambda answer, values: has_words(answer, values["words"]),
    ),
    "three_words": Kind(
        text='Use the words "{words[0]}", "{words[1]}" and "{words[2]}".',
        aspect="words",
        draw=draw_words(3),
        is_met=lambda answer, values: has_words(answer, values["words"]),
    ),
    "word_twice": Kind(
        text='Use the word "{words[0]}" twice.',
        aspect="words",
        draw=draw_words(1),
        is_met=lambda answer, values: words_of(answer).count(values["words"][0]) == 2,
    ),
    "first_word": Kind(
        text="Start with the word {word}.",
        aspect="form",
        draw=lambda rng, vocabulary: {"word": rng.choice(vocabulary.words).capitalize()},
        is_met=lambda answer, values: starts_with(answer, values["word"]),
    ),
    "first_words": Kind(
        text="Start your answer with: {phrase}",
        aspect="form",
        draw=lambda rng, vocabulary: {"phrase": rng.choice(vocabulary.phrases).capitalize()},
        is_met=lambda answer, values: starts_with(answer, values["phrase"]),
    ),
    "title": Kind(
        text="Give it a title in double angle brackets, such as <<title>>.",
        aspect="form",
        is_met=lambda answer, values: has_title(answer),
    ),
    "numbered_list": Kind(
        text="Write a numbered list of {num_items} short items.",
        aspect="form",
        draw=lambda rng, vocabulary: {"num_items": rng.choice((2, 3))},
        is_met=lambda answer, values: is_numbered_list(answer, values["num_items"]),
        requests=("Tell me about {subject}.", "Describe {subject}.", "What do you know about {subject}?"),
    ),
    "last_words": Kind(
        text="The last words must be: {phrase}.",
        aspect="end",
        draw=lambda rng, vocabulary: {"phrase": rng.choice(vocabulary.phrases)},
        is_met=lambda answer, values: ends_with(answer, values["phrase"]),
    ),
    "no_commas": Kind(
        text="Do not use commas.",
        aspect="commas",
        is_met=lambda answer, values: "," not in answer,
    ),
    "at_most": Kind(
        text="Use at most {num_words} words.",
        aspect="length",
        draw=lambda rng, vocabulary: {"num_words": rng.choice((10, 12, 15))},
        is_met=lambda answer, values: len(words_of(answer)) <= values["num_words"],
    ),
}


def split_vocabulary(rng: random.Random) -> tuple[Vocabulary, Vocabulary]:
    """Shuffle subjects, words and phrases, and return those of training and those of held-out prompts."""
    training, held_out = {}, {}
    for name, values in (("subjects", SUBJECTS), ("words", WORDS), ("phrases", PHRASES)):
        shuffled = rng.sample(values, len(values))
        count = int(len(values) * HELD_OUT_FRACTION)
        training[name], held_out[name] = shuffled[count:], shuffled[:count]
    return Vocabulary(**training), Vocabulary(**held_out)


def make_row(rng: random.Random, vocabulary: Vocabulary, kind: str) -> Row:
    """Draw a prompt with a constraint of `kind`, and in some rows with one of another aspect."""
    subject = rng.choice(vocabulary.subjects)
    kinds = [kind]
    if rng.random() < PAIR_FRACTION:
        kinds.append(rng.choice([other for other in KINDS if KINDS[other].aspect != KINDS[kind].aspect]))
    constraints = [{"kind": each, **KINDS[each].draw(rng, vocabulary)} for each in kinds]
    requests = next((KINDS[each].requests for each in kinds if KINDS[each].requests is not REQUESTS), REQUESTS)
    texts = [rng.choice(requests).format(subject=subject)]
    texts += [KINDS[each["kind"]].text.format(**each) for each in constraints]
    return {
        "messages": {"role": "user", "content": " ".join(texts)},
        "gt_answer": json.dumps({"subject": subject, "constraints": constraints}),
    }


def distinct_rows(rng: random.Random, vocabulary: Vocabulary, count: int) -> list[Row]:
    """Draw `count` rows, no two with the same prompt; every kind is drawn equally often."""
    found: dict[str, Row] = {}
    while len(found) < count:
        row = make_row(rng, vocabulary, list(KINDS)[len(found) % len(KINDS)])
        found.setdefault(row["messages"]["content"], row)
    return list(found.values())


def make_rows(seed: int, *, num_train: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and the held-out ones."""
    rng = random.Random(seed)
    training, held_out = split_vocabulary(rng)
    rows = distinct_rows(rng, held_out, num_eval)
    return distinct_rows(rng, training, num_train), rows


def score(response: str, ground_truth: str) -> dict[str, Any]:
    """Score an answer: the share of what was asked that it meets; it is correct if it meets everything.

    Besides its constraints, an answer has to name its subject and to have MIN_WORDS words.
    """
    truth = json.loads(ground_truth)
    answer = response.strip()
    has_sense = len(words_of(answer)) >= MIN_WORDS and names(answer, truth["subject"])
    met = {values["kind"]: KINDS[values["kind"]].is_met(answer, values) for values in truth["constraints"]}
    missed = [kind for kind, is_met in met.items() if not is_met] + ([] if has_sense else ["subject"])
    return {
        "reward": 1.0 - len(missed) / (len(met) + 1),
        "answer_correct": not missed,
        "detail": f"missed: {', '.join(missed)}" if missed else "",
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the rows of a seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder for train.jsonl and eval.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, default=4096, help="training prompts")
    parser.add_argument("--num-eval", type=int, default=192, help="held-out prompts")
    arguments = parser.parse_args()
    rows = make_rows(arguments.seed, num_train=arguments.num_train, num_eval=arguments.num_eval)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    for name, split in zip(("train", "eval"), rows, strict=True):
        write_rows(arguments.out_dir / f"{name}.jsonl", split)


if __name__ == "__main__":
    main()
