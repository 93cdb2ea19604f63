"""The quickstart's task: two-digit additions and subtractions told as one-sentence stories.

In: a random generator. Out: `Problem`s (operands, question, worked answer), split so that no pair of operands is on both sides.
The held-out split is by *unordered* pair: 45 + 23 is never trained on when 23 + 45 (or 45 - 23) is evaluated.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
NAMES = ("Ada", "Ben", "Eva", "Leo", "Mia", "Tom")
OBJECTS = ("apples", "books", "coins", "eggs", "pens", "shells")
ADDITIONS = (
    "{name} has {a} {objects} and buys {b} more. How many now?",
    "{name} counts {a} {objects}, then {b} others. How many in all?",
    "A box holds {a} {objects}. {name} adds {b}. How many are in it?",
)
SUBTRACTIONS = (
    "{name} has {a} {objects} and gives away {b}. How many are left?",
    "{name} had {a} {objects} but lost {b} of them. How many remain?",
    "A box holds {a} {objects}. {name} takes {b} out. How many stay?",
)
SMALLEST, LARGEST = 10, 99
HELD_OUT_FRACTION = 0.15

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One story with its answer."""

    question: str
    solution: str  # what a trained model should write: the sum, then the result in a box
    answer: str  # the result alone, as a decimal number


def split_pairs(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Shuffle all unordered operand pairs and return (training pairs, held-out pairs)."""
    pairs = list(combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    rng.shuffle(pairs)
    num_held_out = int(len(pairs) * HELD_OUT_FRACTION)
    return pairs[num_held_out:], pairs[:num_held_out]


def make_problem(pair: Pair, rng: random.Random) -> Problem:
    """Tell `pair` as a random story; subtractions take the smaller operand away, so that no answer is negative."""
    is_addition = rng.random() < 0.5
    low, high = pair
    a, b = (high, low) if not is_addition or rng.random() < 0.5 else (low, high)
    template = rng.choice(ADDITIONS if is_addition else SUBTRACTIONS)
    result = a + b if is_addition else a - b
    question = template.format(name=rng.choice(NAMES), objects=rng.choice(OBJECTS), a=a, b=b)
    return Problem(question=question, solution=solve(a, b, sign=1 if is_addition else -1), answer=str(result))


def solve(a: int, b: int, *, sign: int) -> str:
    """Work out a + sign * b, tens and units apart: `27 + 45 = 60 + 12 = \\boxed{72}`, `72 - 45 = 30 - 3 = \\boxed{27}`."""
    tens = (a // 10 + sign * (b // 10)) * 10
    units = a % 10 + sign * (b % 10)
    operator = "+" if sign > 0 else "-"
    inner = "+" if units >= 0 else "-"
    return f"{a} {operator} {b} = {tens} {inner} {abs(units)} = \\boxed{{{a + sign * b}}}"


def problems(pairs: list[Pair], rng: random.Random) -> Iterator[Problem]:
    """Draw problems over `pairs` for ever, with replacement."""
    while True:
        yield make_problem(rng.choice(pairs), rng)


def distinct_problems(pairs: list[Pair], rng: random.Random, *, count: int) -> list[Problem]:
    """Draw `count` problems, no two with the same question."""
    found: dict[str, Problem] = {}
    for problem in problems(pairs, rng):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def to_row(problem: Problem) -> dict[str, Any]:
    """A line of a prompt file, in the project's math format."""
    return {"messages": {"role": "user", "content": problem.question}, "gt_answer": problem.answer}
