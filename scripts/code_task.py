"""Generate a coding task for a tiny model: short stories that ask for one of six programs with two numbers.

In: a random generator. Out: `Problem`s (question, a teacher's program, tests in the project's code format), split so
that no pair of name and object is in both parts.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

NAMES = ("Ada", "Ben", "Eva", "Leo", "Mia", "Tom", "Ida", "Jon", "Kim", "Lia", "Max", "Zoe")
OBJECTS = ("apples", "books", "coins", "eggs", "pens", "shells", "cards", "keys", "nuts", "rings", "stones", "stamps")
HELD_OUT_FRACTION = 0.15  # of the pairs of name and object
NUM_TESTS = 4
LARGEST = 99
HABIT = "a + b"  # the careless teacher's expression for every question

# (question, correct expression, its function)
STORIES: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("{name} has a {objects} and gets b more. How many now?", "a + b", lambda a, b: a + b),
    ("{name} has a {objects} and gives b away. How many are left?", "a - b", lambda a, b: a - b),
    ("{name} has a boxes of b {objects} each. How many in all?", "a * b", lambda a, b: a * b),
    ("{name} shares a {objects} evenly among b friends. How many remain?", "a % b", lambda a, b: a % b),
    ("{name} sees a {objects} here and b there. How many are in the larger heap?", "max(a, b)", max),
    ("{name} sees a {objects} here and b there. How many are in the smaller heap?", "min(a, b)", min),
)

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Hold one story with its tests."""

    system_prompt: ClassVar[str] = "You are a helpful assistant."  # the default of the code reward

    question: str
    solution: str  # the teacher's text
    ending: str  # of a correct solution
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return a line of a prompt file."""
        tests = {"inputs": list(self.inputs), "outputs": list(self.outputs)}
        return {"messages": {"role": "user", "content": self.question}, "test_cases": tests}


def write_program(expression: str) -> str:
    """Return a response: a program that reads a and b from two lines and prints the expression."""
    return f"```python\na = int(input())\nb = int(input())\nprint({expression})\n```"


def make_problem(story: int, pair: Pair, rng: random.Random, *, careless_rate: float = 0.0) -> Problem:
    """Generate a story of STORIES, with tests that no other story's program passes."""
    text, expression, right = STORIES[story]
    others = [other for index, (_, _, other) in enumerate(STORIES) if index != story]
    while True:
        numbers = [(rng.randint(1, LARGEST), rng.randint(1, LARGEST)) for _ in range(NUM_TESTS)]
        outputs = [right(a, b) for a, b in numbers]
        if all([other(a, b) for a, b in numbers] != outputs for other in others):
            break
    return Problem(
        question=text.format(name=pair[0], objects=pair[1]),
        solution=write_program(HABIT if rng.random() < careless_rate else expression),
        ending=write_program(expression),
        inputs=tuple(f"{a}\n{b}\n" for a, b in numbers),
        outputs=tuple(f"{output}\n" for output in outputs),
    )


def make_lessons(
    rng: random.Random, *, num_train: int, num_eval: int, careless_rate: float
) -> tuple[list[Problem], list[Problem], Iterator[Problem]]:
    """Return (prompts to train on, held-out prompts, an endless iterator of the teacher's solved examples).

    The number of stories is limited, so the lists may be shorter than requested.
    """
    pairs = list(product(NAMES, OBJECTS))
    rng.shuffle(pairs)
    num_held_out = int(len(pairs) * HELD_OUT_FRACTION)
    training, held_out = pairs[num_held_out:], pairs[:num_held_out]

    def lessons() -> Iterator[Problem]:
        while True:
            yield make_problem(rng.randrange(len(STORIES)), rng.choice(training), rng, careless_rate=careless_rate)

    return _shuffled(training, rng)[:num_train], _shuffled(held_out, rng)[:num_eval], lessons()


def _shuffled(pairs: list[Pair], rng: random.Random) -> list[Problem]:
    """Return every story with every pair in random order."""
    found = [make_problem(story, pair, rng) for pair in pairs for story in range(len(STORIES))]
    rng.shuffle(found)
    return found
