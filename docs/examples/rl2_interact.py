"""Search in RL2's form: `interact` as its README prints it (section Tools), with a library of two entries.

coati-rl rl --env rl2_interact.py ...
"""

import re

LIBRARY = {"capital of France": "Paris", "capital of Peru": "Lima"}


def parse_query(text):
    return re.findall(r"<search>(.*?)</search>", text, re.DOTALL)


def search(query):
    return LIBRARY.get(query.strip(), "nothing found")


def reward_fn(messages, answer):
    return float(messages[-1]["content"].strip() == answer)


def interact(messages):
    queries = parse_query(messages[-1]["content"])
    results = [search(query) for query in queries]
    return [
        {"role": "tool", "content": result}
        for result in results
    ]  # fmt: skip
