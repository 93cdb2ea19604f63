"""`python -m rewards score --type TYPE < in.jsonl > out.jsonl`: rows to score flow in, scores flow out, line for line.

A line in: {"response": str, "gt_answer": str or number}. A line out: {"reward", "answer_correct", "format_valid",
"verdict", "detail"}. Exit 0 when all lines were scored, whatever their verdicts; 2 with one message on stderr when an
argument or a line is bad (nothing is scored then); 1 when scoring itself failed; 130 on Ctrl-C.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import BinaryIO

from coati_rl.errors import ConfigError, RunError
from rewards.pool import RewardPool
from rewards.registry import get_reward


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. argparse itself raises SystemExit(2) for bad arguments."""
    options = _parser().parse_args(arguments)
    try:
        get_reward(options.type)  # refused before a line is read
        rows = read_rows(sys.stdin.buffer)
        with RewardPool(options.type, num_workers=options.num_workers, timeout_s=options.timeout_s) as pool:
            futures = [pool.submit([response], ground_truth) for response, ground_truth in rows]
            for future in futures:
                sys.stdout.write(json.dumps(asdict(future.result()[0])) + "\n")
            sys.stdout.flush()
    except ConfigError as error:
        return _fail(2, str(error))
    except RunError as error:
        return _fail(1, str(error))
    except BrokenPipeError:
        # Whoever read the output has seen enough. The interpreter flushes stdout once more at its exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def read_rows(stream: BinaryIO) -> list[tuple[str, str]]:
    """(response, ground truth) of each line of a JSONL stream.

    Raises: ConfigError with the line number for a line that is not such a row.
    """
    return [_row(line, number) for number, line in enumerate(stream, start=1)]


def _row(line: bytes, number: int) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise ConfigError(f'line {number} has no "response" (text)')
    return row["response"], _ground_truth(row.get("gt_answer"), number)


def _ground_truth(value: object, number: int) -> str:
    is_finite_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not is_finite_number:
        raise ConfigError(f'line {number} has no "gt_answer" (text or a finite number)')
    return str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rewards", description="Scores responses outside of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", help="score JSON lines from stdin to stdout")
    score.add_argument("--type", required=True, help="reward type, as -rt/--reward-type of a run")
    score.add_argument("--num-workers", type=int, default=1, help="scoring processes (default: 1)")
    score.add_argument("--timeout-s", type=float, default=5.0, help="seconds that one response may take (default: 5)")
    return parser


def _fail(exit_code: int, message: str) -> int:
    sys.stderr.write(f"rewards: {message}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
