"""Generate word problems of one to three operations on numbers of three digits: the task of scripts/tool_use.sh.

    python scripts/word_problem_task.py OUT_DIR --seed 0   # writes chat_template.jinja, sft, train and eval.jsonl

A problem has a kind (a product, a product and a rest, two products, shares) and is told in one of four ways. A quarter
of the names and things, and one telling of each kind, are held out: they are in no other file. All conversations of
sft.jsonl end with the right number. Where they offer the calculator, three in ten call it and the others write the
number down at once, which a small model cannot learn to do: it learns the form, and that both ways exist.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instruction_task import write_rows
from tool_chat_template import CHAT_TEMPLATE

from producer.tools.calculator import Calculator, calculate

Row = dict[str, Any]
Numbers = Mapping[str, int]

_NAMES = "Ada Ben Chloe Dan Eva Finn Grace Hugo Ivy Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tom Zoe"
_THINGS = """
apples beads books bricks buttons candles cards coins cookies eggs lemons marbles nails pencils pens plates shells
stamps stickers tickets
"""
NAMES, THINGS = tuple(_NAMES.split()), tuple(_THINGS.split())
CALL_SHARE, DIRECT_SHARE = 0.25, 0.6  # of the conversations; the others have no tool
SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Hold a kind of problem."""

    expression: str  # that solves it, with numbers in braces
    tellings: Sequence[str]  # the last one is held out
    draw: Callable[[random.Random], Numbers]


def of_three_digits(*names: str) -> Callable[[random.Random], Numbers]:
    """Return a function that draws a number of three digits for each name."""
    return lambda rng: {name: rng.randint(103, 989) for name in names}


def rest_of_a_product(rng: random.Random) -> Numbers:
    """Draw `c` below a * b."""
    return {"a": rng.randint(103, 989), "b": rng.randint(103, 989), "c": rng.randint(1003, 9989)}


def a_multiple(rng: random.Random) -> Numbers:
    """Draw `c`, a multiple of `b`."""
    b = rng.randint(103, 989)
    return {"b": b, "c": b * rng.randint(103, 989)}


KINDS = {
    "product": Kind(
        expression="{a} * {b}",
        tellings=(
            "{name} buys {a} boxes of {b} {things}. How many {things} is that?",
            "There are {a} bags with {b} {things} in each. How many {things} are there?",
            "A shelf holds {b} {things}. How many {things} do {a} such shelves hold?",
            "Each of {a} friends of {name} has {b} {things}. How many do they have together?",
        ),
        draw=of_three_digits("a", "b"),
    ),
    "product_and_more": Kind(
        expression="{a} * {b} + {c}",
        tellings=(
            "{name} has {c} {things} and buys {a} boxes of {b} each. How many {things} now?",
            "There are {a} bags with {b} {things} in each, and {c} {things} beside them. How many in all?",
            "{name} finds {a} crates of {b} {things}, and then {c} more {things}. How many did {name} find?",
            "A shop that holds {c} {things} gets {a} packets of {b} {things}. How many does it hold then?",
        ),
        draw=of_three_digits("a", "b", "c"),
    ),
    "rest_of_a_product": Kind(
        expression="{a} * {b} - {c}",
        tellings=(
            "{name} buys {a} boxes of {b} {things} and gives {c} {things} away. How many are left?",
            "Of {a} bags with {b} {things} in each, {c} {things} are lost. How many remain?",
            "{name} makes {b} {things} a day for {a} days and sells {c} of them. How many does {name} keep?",
            "A shop gets {a} packets of {b} {things}; {c} {things} are broken. How many are whole?",
        ),
        draw=rest_of_a_product,
    ),
    "two_products": Kind(
        expression="{a} * {b} + {c} * {d}",
        tellings=(
            "{name} buys {a} boxes of {b} {things} and {c} boxes of {d} {things}. How many {things} is that?",
            "A shop sells {a} {things} for {b} cents each and {c} {others} for {d} cents each. How many cents is that?",
            "{name} makes {a} {things} a day for {b} days, then {c} a day for {d} days. How many in all?",
            "There are {a} shelves of {b} {things} and {c} shelves of {d} {others}. How many pieces do they hold?",
        ),
        draw=of_three_digits("a", "b", "c", "d"),
    ),
    "shares": Kind(
        expression="{c} / {b}",
        tellings=(
            "{name} packs {c} {things} into boxes of {b}. How many boxes are full?",
            "{c} {things} are given to {b} children in equal shares. How many does each child get?",
            "A shop puts {c} {things} on shelves of {b}. How many shelves are filled?",
            "{name} has {c} {things} and uses {b} a day. For how many days are there enough?",
        ),
        draw=a_multiple,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Hold names and things, and which tellings go with them; training and held-out problems have one each."""

    names: Sequence[str]
    things: Sequence[str]
    tellings: slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Hold a problem and the expression that solves it."""

    question: str
    expression: str

    @property
    def answer(self) -> str:
        """Return the solution, an integer."""
        return calculate(self.expression)

    def row(self) -> Row:
        """Return a line of a prompt file."""
        return {"messages": {"role": "user", "content": self.question}, "gt_answer": self.answer}


def split_vocabulary(rng: random.Random) -> tuple[Vocabulary, Vocabulary]:
    """Shuffle names and things, and return what training problems and held-out ones are made of."""
    names, things = rng.sample(NAMES, len(NAMES)), rng.sample(THINGS, len(THINGS))
    return (
        Vocabulary(names=names[5:], things=things[5:], tellings=slice(0, 3)),
        Vocabulary(names=names[:5], things=things[:5], tellings=slice(3, 4)),
    )


def make_problem(rng: random.Random, vocabulary: Vocabulary) -> Problem:
    """Draw a problem."""
    kind = rng.choice([*KINDS.values()])
    numbers = kind.draw(rng)
    things, others = rng.sample(vocabulary.things, 2)
    telling = rng.choice(kind.tellings[vocabulary.tellings])
    question = telling.format(name=rng.choice(vocabulary.names), things=things, others=others, **numbers)
    return Problem(question=question, expression=kind.expression.format(**numbers))


def make_conversation(rng: random.Random, problem: Problem) -> Row:
    """Return a line of sft.jsonl, with or without a call."""
    share = rng.random()
    messages: list[Row] = [{"role": "system", "content": SYSTEM_PROMPT}, problem.row()["messages"]]
    if share < CALL_SHARE:
        function = {"name": "calculator", "arguments": {"expression": problem.expression}}
        call = {"id": "call_0", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": problem.answer})
    messages.append({"role": "assistant", "content": f"The answer is \\boxed{{{problem.answer}}}."})
    return {"messages": messages, "tools": list(Calculator.schemas) if share < CALL_SHARE + DIRECT_SHARE else []}


def make_data(seed: int, *, num_sft: int, num_train: int, num_eval: int) -> dict[str, list[Row]]:
    """Return the rows of each file."""
    rng = random.Random(seed)
    training, held_out = split_vocabulary(rng)
    return {
        "sft": [make_conversation(rng, make_problem(rng, training)) for _ in range(num_sft)],
        "train": [make_problem(rng, training).row() for _ in range(num_train)],
        "eval": [make_problem(rng, held_out).row() for _ in range(num_eval)],
    }


def main() -> None:
    """Write the files of a seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder for the chat template and the three files of rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-sft", type=int, default=512, help="conversations")
    parser.add_argument("--num-train", type=int, default=2048, help="training problems")
    parser.add_argument("--num-eval", type=int, default=192, help="held-out problems")
    given = parser.parse_args()
    given.out_dir.mkdir(parents=True, exist_ok=True)
    (given.out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    data = make_data(given.seed, num_sft=given.num_sft, num_train=given.num_train, num_eval=given.num_eval)
    for name, rows in data.items():
        write_rows(given.out_dir / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
