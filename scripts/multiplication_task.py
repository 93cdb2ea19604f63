"""Generate the task of the agents' quickstart: products of two numbers of three digits.

In: a random generator. Out: prompts, held-out prompts with other operands, and conversations for supervised
fine-tuning. All conversations end with the right product. Some have it from a call of the calculator, more write it
down at once though the prompt offers the calculator, and the others have no tool. What can be learned from a direct
answer is its form: products of such numbers are beyond a tiny model.
"""

import random
from typing import Any

from arithmetic_task import NAMES, OBJECTS, Problem

from producer.tools.calculator import Calculator, calculate

Row = dict[str, Any]
Pair = tuple[int, int]

QUESTIONS = (
    "What is {a} * {b}?",
    "{name} buys {a} boxes of {b} {objects}. How many in all?",
    "{name} has {a} bags with {b} {objects} in each. How many in all?",
)
SMALLEST, LARGEST = 320, 999  # operands; their products all have six digits, so that questions differ in no length
CALL_SHARE, DIRECT_SHARE = 0.25, 0.6  # of the conversations; the others have no tool


def make_data(
    rng: random.Random, *, num_train: int, num_eval: int, num_conversations: int
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return (prompts to train on, held-out prompts, conversations); no pair of operands is held out and elsewhere."""
    held_out: dict[Pair, Row] = {}
    while len(held_out) < num_eval:
        a, b = _operands(rng)
        held_out.setdefault(_unordered(a, b), _prompt(rng, a, b))
    prompts = [_prompt(rng, *_other_operands(rng, held_out)) for _ in range(num_train)]
    conversations = [make_conversation(rng, *_other_operands(rng, held_out)) for _ in range(num_conversations)]
    return prompts, list(held_out.values()), conversations


def make_conversation(rng: random.Random, a: int, b: int) -> Row:
    """Return a line of sft.jsonl about a * b, with or without a call."""
    kind = rng.random()
    messages: list[Row] = [{"role": "system", "content": Problem.system_prompt}, _question(rng, a, b)]
    if kind < CALL_SHARE:
        arguments = {"expression": f"{a} * {b}"}
        call = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = calculate(arguments["expression"])
        messages.append({"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": result})
        messages.append({"role": "assistant", "content": f"\\boxed{{{result}}}"})
    else:
        messages.append({"role": "assistant", "content": f"The answer is {a} * {b} = \\boxed{{{a * b}}}"})
    return {"messages": messages, "tools": list(Calculator.schemas) if kind < CALL_SHARE + DIRECT_SHARE else []}


def _prompt(rng: random.Random, a: int, b: int) -> Row:
    return {"messages": _question(rng, a, b), "gt_answer": str(a * b)}


def _question(rng: random.Random, a: int, b: int) -> Row:
    text = rng.choice(QUESTIONS).format(a=a, b=b, name=rng.choice(NAMES), objects=rng.choice(OBJECTS))
    return {"role": "user", "content": text}


def _operands(rng: random.Random) -> Pair:
    return rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)


def _other_operands(rng: random.Random, held_out: dict[Pair, Row]) -> Pair:
    while True:
        a, b = _operands(rng)
        if _unordered(a, b) not in held_out:
            return a, b


def _unordered(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)
