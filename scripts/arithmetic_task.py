"""Generate the quickstart's task: additions and subtractions of two-digit numbers as short stories.

In: a random generator. Out: `Problem`s (question, worked solution, answer), split so that no pair of operands is on
both sides. The held-out split is by *unordered* pair: 45 + 23 is never trained on when 23 + 45 or 45 - 23 is evaluated.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any, ClassVar

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
HELD_OUT_FRACTION = 0.15  # of the pairs
CARRY_FRACTION = 0.62  # of the stories; the others are solved by a model that never carries

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Hold one story with its answer."""

    system_prompt: ClassVar[str] = "Please reason step by step, and put your final answer within \\boxed{}."

    question: str
    solution: str  # the teacher's text: the calculation, then the result in a box
    answer: str  # the correct result, as a decimal number

    @property
    def ending(self) -> str:
        """Return the end of a correct solution."""
        return f"\\boxed{{{self.answer}}}"

    def row(self) -> dict[str, Any]:
        """Return a line of a prompt file, in the project's math format."""
        return {"messages": {"role": "user", "content": self.question}, "gt_answer": self.answer}


def split_pairs(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Shuffle all unordered operand pairs and return (training pairs, held-out pairs)."""
    pairs = list(combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    rng.shuffle(pairs)
    num_held_out = int(len(pairs) * HELD_OUT_FRACTION)
    return pairs[num_held_out:], pairs[:num_held_out]


def solve(a: int, b: int, *, sign: int, is_careless: bool = False) -> tuple[str, int]:
    """Compute a + sign * b with tens and units apart. Returns: (text, result).

    `27 + 45 = 60 + 12 = \\boxed{72}` and `72 - 45 = 30 - 3 = \\boxed{27}`; the careless method omits carry and borrow
    and appends the last digit to the tens: `\\boxed{62}` and `\\boxed{33}`.
    """
    tens = (a // 10 + sign * (b // 10)) * 10
    units = a % 10 + sign * (b % 10)
    result = tens + abs(units) % 10 if is_careless else a + sign * b
    operator, inner = "+" if sign > 0 else "-", "+" if units >= 0 else "-"
    return f"{a} {operator} {b} = {tens} {inner} {abs(units)} = \\boxed{{{result}}}", result


def needs_carry(a: int, b: int, *, sign: int) -> bool:
    """Return True if the careless method gives a wrong result."""
    return solve(a, b, sign=sign) != solve(a, b, sign=sign, is_careless=True)


def make_problem(pairs: list[Pair], rng: random.Random, *, careless_rate: float = 0.0) -> Problem:
    """Generate a random story with one of `pairs`.

    All answers have at least two digits. `careless_rate` is the fraction of carries that the solution omits; the answer
    is always correct.
    """
    wants_carry = rng.random() < CARRY_FRACTION
    while True:
        sign = rng.choice((1, -1))
        low, high = rng.choice(pairs)
        a, b = (low, high) if sign > 0 and rng.random() < 0.5 else (high, low)
        if a + sign * b >= SMALLEST and needs_carry(a, b, sign=sign) == wants_carry:
            break
    template = rng.choice(ADDITIONS if sign > 0 else SUBTRACTIONS)
    question = template.format(name=rng.choice(NAMES), objects=rng.choice(OBJECTS), a=a, b=b)
    solution, _ = solve(a, b, sign=sign, is_careless=rng.random() < careless_rate)
    return Problem(question=question, solution=solution, answer=str(a + sign * b))


def problems(pairs: list[Pair], rng: random.Random, *, careless_rate: float = 0.0) -> Iterator[Problem]:
    """Draw problems with `pairs` endlessly, with replacement."""
    while True:
        yield make_problem(pairs, rng, careless_rate=careless_rate)


def distinct_problems(pairs: list[Pair], rng: random.Random, *, count: int) -> list[Problem]:
    """Draw `count` problems, no two with the same question."""
    found: dict[str, Problem] = {}
    for problem in problems(pairs, rng):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def make_lessons(
    rng: random.Random, *, num_train: int, num_eval: int, careless_rate: float
) -> tuple[list[Problem], list[Problem], Iterator[Problem]]:
    """Return (prompts to train on, held-out prompts, an endless iterator of the teacher's solved examples)."""
    training_pairs, held_out_pairs = split_pairs(rng)
    held_out = distinct_problems(held_out_pairs, rng, count=num_eval)
    prompts = distinct_problems(training_pairs, rng, count=num_train)
    return prompts, held_out, problems(training_pairs, rng, careless_rate=careless_rate)
