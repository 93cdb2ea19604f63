"""`python -m rewards score`: JSON lines to score flow in on stdin, their scores flow out on stdout, line for line.

A bounded number of rows is in flight, and each score is written as soon as those before it are: a million rows need no
more memory than a thousand. Is unblocked by: the pool, which settles every row.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import chain

from coati_rl.types import Score
from rewards.commands.command_arguments import add_reward_arguments, reward_spec
from rewards.commands.score_rows import CheckedRows, Row
from rewards.remote.wire import score_fields
from rewards.workers.pool import RewardPool

# A row that takes its whole time limit must not leave the other workers idle; a row of code tests may be megabytes.
_MAX_ROWS_IN_FLIGHT = 4096
_MAX_BYTES_IN_FLIGHT = 64 << 20
_ERASE_LINE = "\r\x1b[2K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `score`."""
    add_reward_arguments(parser)
    parser.add_argument("--num-workers", type=int, default=1, help="scoring processes (default: 1)")


def score_command(options: argparse.Namespace) -> None:
    """Score stdin to stdout. Raises: ConfigError for a bad argument or line, before anything is scored; RunError."""
    spec = reward_spec(options)
    with (
        closing(CheckedRows(sys.stdin.buffer)) as rows,
        RewardPool(spec, num_workers=options.num_workers, timeout_s=spec.timeout_s) as pool,
        _progress(rows.num_rows) as (advance, line_start),
    ):
        for score in _scores(pool, rows):
            sys.stdout.write(f"{line_start}{json.dumps(score_fields(score), allow_nan=False)}\n")
            advance()
        sys.stdout.flush()


def _scores(pool: RewardPool, rows: Iterable[Row]) -> Iterator[Score]:
    """The scores of the rows, in order."""
    in_flight: deque[tuple[Future[list[Score]], int]] = deque()
    num_bytes = 0
    for row in chain(rows, [None]):
        while in_flight and (
            row is None
            or in_flight[0][0].done()
            or len(in_flight) >= _MAX_ROWS_IN_FLIGHT
            or num_bytes + row.num_bytes > _MAX_BYTES_IN_FLIGHT
        ):
            future, size = in_flight.popleft()
            if not future.done():
                sys.stdout.flush()  # whoever reads sees what there is while this one takes its time
            yield future.result()[0]
            num_bytes -= size
        if row is not None:
            in_flight.append((pool.submit([row.response], row.problem), row.num_bytes))
            num_bytes += row.num_bytes


@contextmanager
def _progress(num_rows: int) -> Iterator[tuple[Callable[[], object], str]]:
    """A bar on stderr if that is a terminal.

    Yields: (what to call after each row, what a line on stdout has to start with).
    """
    if not sys.stderr.isatty():
        yield (lambda: None), ""
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("scored"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("scored", total=num_rows)
        # On a terminal that shows both streams a line takes the place of the bar, which is drawn again below it.
        yield (lambda: progress.advance(task)), _ERASE_LINE if sys.stdout.isatty() else ""
