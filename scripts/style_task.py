"""Generate requests for a sentence, and judge answers by a style that no request mentions: scripts/reward_model.sh.

    python scripts/style_task.py OUT_DIR --seed 0      # writes OUT_DIR/train.jsonl and OUT_DIR/eval.jsonl
    coati-rl generate -d OUT_DIR/train.jsonl -rt scripts/style_task.py:score --pairs ...

The judge stands for people who compare answers: it wants a short sentence without commas that begins with its subject.
A policy sees none of this; it can learn it from comparisons alone. The ground truth of a row is its subject. No subject
of a held-out row is in a training row.
"""

import argparse
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_WORDS, MIN_WORDS = 15, 4
FIRST_WORDS = 3  # among which the subject is

WISHES: Mapping[str, Callable[[str, str], bool]] = {  # of an answer and its subject
    "short": lambda answer, subject: MIN_WORDS <= len(answer.split()) <= MAX_WORDS,
    "no commas": lambda answer, subject: "," not in answer,
    "begins with its subject": lambda answer, subject: begins_with(answer, subject),
}


def begins_with(answer: str, subject: str) -> bool:
    """Return True if one of the first words is the subject, in the plural or the singular."""
    first = re.findall(r"[a-z]+", answer.lower())[:FIRST_WORDS]
    return not {subject, subject.removesuffix("s")}.isdisjoint(first)


def score(response: str, ground_truth: str) -> dict[str, Any]:
    """Score an answer: the share of what the judge wants; it is correct if it has everything."""
    answer = response.strip()
    missed = [wish for wish, is_met in WISHES.items() if not is_met(answer, ground_truth)]
    return {
        "reward": 1.0 - len(missed) / len(WISHES),
        "answer_correct": not missed,
        "detail": f"missed: {', '.join(missed)}" if missed else "",
    }


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train on and the held-out ones: each request about each subject, shuffled."""
    from instruction_task import REQUESTS, split_vocabulary  # this file is loaded alone to score

    rng = random.Random(seed)

    def rows(subjects: Sequence[str]) -> list[dict[str, Any]]:
        pairs = [(request, subject) for subject in subjects for request in REQUESTS]
        return [
            {"messages": {"role": "user", "content": request.format(subject=subject)}, "gt_answer": subject}
            for request, subject in rng.sample(pairs, len(pairs))
        ]

    training, held_out = split_vocabulary(rng)
    return rows(training.subjects), rows(held_out.subjects)


def main() -> None:
    """Write the rows of a seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder for train.jsonl and eval.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from instruction_task import write_rows

    given.out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "eval"), make_rows(given.seed), strict=True):
        write_rows(given.out_dir / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
