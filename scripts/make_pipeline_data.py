"""Write the data of `scripts/pipeline_example.sh`: one row a line for each of its jobs, on the quickstart's task.

    python scripts/make_pipeline_data.py OUT_DIR [--seed 0] [--num-conversations 16384] [--num-pairs 4096]

Out, in OUT_DIR:

    sft.jsonl         {"messages"}: problems, solved by a teacher who omits most carries
    pairs.jsonl       {"prompt", "chosen", "rejected"}: a problem with a carry, solved correctly and carelessly
    eval_pairs.jsonl  the same with held-out pairs of operands
    train.jsonl, eval.jsonl    prompts with their answers
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from arithmetic_task import Pair, Problem, make_problem, needs_carry, problems, solve, split_pairs
from make_tiny_model import chat, write_rows

CARELESS_RATE = 0.7
NUM_HELD_OUT = 256


def conversation(problem: Problem) -> dict[str, Any]:
    """Return a row of supervised training."""
    return {"messages": [*chat(problem), {"role": "assistant", "content": problem.solution}]}


def preferences(pairs: list[Pair], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield rows of a reward model endlessly: the correct solution is preferred to the careless one."""
    while True:
        problem = make_problem(pairs, rng, careless_rate=rng.choice((0.0, 1.0)))
        a, operator, b, *_ = problem.solution.split()
        sign = 1 if operator == "+" else -1
        if needs_carry(int(a), int(b), sign=sign):
            right, _ = solve(int(a), int(b), sign=sign)
            wrong, _ = solve(int(a), int(b), sign=sign, is_careless=True)
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in (right, wrong))
            yield {"prompt": chat(problem), "chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-conversations", type=int, default=16384)
    parser.add_argument("--num-pairs", type=int, default=4096)
    parser.add_argument("--num-prompts", type=int, default=16384)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    training, held_out = split_pairs(rng)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    lessons = problems(training, rng, careless_rate=CARELESS_RATE)
    write(arguments.out_dir / "sft.jsonl", [conversation(p) for p in islice(lessons, arguments.num_conversations)])
    write(arguments.out_dir / "pairs.jsonl", [*islice(preferences(training, rng), arguments.num_pairs)])
    write(arguments.out_dir / "eval_pairs.jsonl", [*islice(preferences(held_out, rng), NUM_HELD_OUT)])
    write_rows(arguments.out_dir / "train.jsonl", [*islice(problems(training, rng), arguments.num_prompts)])
    write_rows(arguments.out_dir / "eval.jsonl", [*islice(problems(held_out, rng), NUM_HELD_OUT)])


if __name__ == "__main__":
    main()
