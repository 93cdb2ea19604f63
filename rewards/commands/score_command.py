"""Run `python -m rewards score`: score the JSON lines of stdin and write a line to stdout for each.

All lines are checked before any is scored. A bounded number of lines is in flight, and each score is written as soon as
those before it are, so that memory does not grow with the number of lines.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

from coati_rl.errors import ConfigError
from coati_rl.reading.ground_truth import ANSWER_KEYS, ground_truth, required_truth
from coati_rl.reward_spec import NO_COLUMNS, RewardColumns
from coati_rl.types import Problem, Score
from rewards.commands.command_arguments import add_reward_arguments, reward_spec
from rewards.registry import columns_of, needs_ground_truth
from rewards.remote.wire import score_fields
from rewards.scoring import open_scorer

if TYPE_CHECKING:  # it imports torch
    from coati_rl.protocols import GroupScorer

_MAX_IN_FLIGHT = 512  # enough to keep other workers busy while one line takes its whole time limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `score`."""
    add_reward_arguments(parser)
    parser.add_argument("--num-workers", type=int, default=1, help="scoring processes (default: 1)")
    parser.add_argument("--answer-key", help=f"field with the answer (default: one of {', '.join(ANSWER_KEYS)})")


def score_command(options: argparse.Namespace) -> None:
    """Score stdin to stdout. Raises: ConfigError for an invalid argument or line, before scoring; RunError."""
    spec = reward_spec(options)
    needs_truth = required_truth(spec.reward_type, needs_truth=needs_ground_truth(spec.reward_type)) is not None
    parse = functools.partial(
        parse_line, answer_key=options.answer_key, needs_truth=needs_truth, columns=columns_of(spec.reward_type)
    )
    with tempfile.TemporaryFile() as lines:  # stdin may be a pipe, which can be read only once
        for number, line in enumerate(sys.stdin.buffer, 1):
            parse(line, number)
            lines.write(line)
        lines.seek(0)
        with closing(open_scorer(spec, num_workers=options.num_workers)) as scorer:
            for score in _scores(scorer, lines, parse):
                sys.stdout.write(json.dumps(score_fields(score), allow_nan=False) + "\n")
                sys.stdout.flush()


def parse_line(
    line: bytes,
    number: int,
    answer_key: str | None = None,
    *,
    needs_truth: bool = True,
    columns: RewardColumns = NO_COLUMNS,
) -> tuple[str, Problem]:
    """Read the response and the problem of a line.

    Args:
        line: of JSON.
        number: of the line, from 1.
        answer_key: the field with the answer; None: one of ANSWER_KEYS.
        needs_truth: the reward needs an answer or tests.
        columns: further fields that the reward reads.
    Raises: ConfigError with the line's number and the problem.
    """
    where = f"line {number}"
    if not line.strip():
        raise ConfigError(f"{where} is blank; remove it, since line {number} of the output is the score of this one")
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise ConfigError(f'{where} has no "response" (text)')
    has_tests = row.get("test_cases") is not None
    if row.get(answer_key or "gt_answer") is not None and has_tests:
        raise ConfigError(
            f'{where} has "{answer_key or "gt_answer"}" and "test_cases"; keep the one that your reward checks'
        )
    if (
        needs_truth
        and not has_tests
        and all(row.get(key) is None for key in ([answer_key] if answer_key else ANSWER_KEYS))
    ):
        raise ConfigError(f'{where} has no "gt_answer" (text or a finite number) and no "test_cases"')
    messages = _messages_of(row, where)
    if _end_with_response(messages, row["response"], where):
        messages = messages[:-1]
        row = {**row, "messages": messages}
    prompt = row.get("prompt") or ""
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: "prompt" must be text')
    truth = ground_truth(row, "test_cases" if has_tests else None, where, answer_key=answer_key)
    if missing := [name for name in columns.required if name not in row]:
        raise ConfigError(f'{where} has no "{missing[0]}", which the function of --type takes')
    kept = {key: value for key, value in row.items() if key != "response"} if columns.are_kept else {}
    return row["response"], Problem(
        ground_truth=truth, uid=where, messages=tuple(messages), prompt=prompt, columns=kept
    )


def _messages_of(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    messages = row.get("messages") or []
    messages = [messages] if isinstance(messages, dict) else messages
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f'{where}: "messages" must be [{{"role": ..., "content": ...}}, ...]')
    return messages


def _end_with_response(messages: list[dict[str, Any]], response: str, where: str) -> bool:
    """True for messages as `coati-rl generate` writes them. Raises: ConfigError if they end with another answer."""
    if not messages or messages[-1].get("role") != "assistant":
        return False
    if messages[-1].get("content") != response:
        raise ConfigError(
            f'{where}: "messages" ends with a turn of the assistant that is not the "response"; leave that turn out, '
            "or write it as the response"
        )
    return True


def _scores(
    scorer: "GroupScorer", lines: Iterable[bytes], parse: Callable[[bytes, int], tuple[str, Problem]] = parse_line
) -> Iterator[Score]:
    """Yield the scores of the lines, in order."""
    in_flight: deque[Future[list[Score]]] = deque()
    for number, line in enumerate(lines, 1):
        response, problem = parse(line, number)
        in_flight.append(scorer.submit([response], problem))
        while in_flight and (in_flight[0].done() or len(in_flight) >= _MAX_IN_FLIGHT):
            yield in_flight.popleft().result()[0]
    for future in in_flight:
        yield future.result()[0]
