"""Write runs as one HTML file: `coati-rl report RUN [RUN2 ...] -o report.html`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.report.page import report

_PROG = "coati-rl report"


def parse_steps(text: str) -> list[int]:
    """Return the numbers of `--steps 1,137`. Raises: ConfigError for anything else."""
    try:
        steps = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        steps = [0]
    if any(step < 1 for step in steps):
        raise ConfigError(f"--steps {text}: give optimizer steps, from 1, with commas between them, as 1,137")
    return steps


def main(arguments: Sequence[str]) -> int:
    """Write the page. Returns: the exit code; 2 for invalid arguments, as for a directory that is no run's."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, also of one that goes on"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write; default for one run: report.html in its directory"
    )
    parser.add_argument(
        "--steps", default="", metavar="N,M", help="steps whose rollouts are shown besides those chosen evenly"
    )
    given = parser.parse_args(arguments)
    try:
        if given.output is None and len(given.runs) > 1:
            raise ConfigError("several runs are shown in one page: name it with -o FILE.html")
        output = given.output or given.runs[0] / "report.html"
        page = report(given.runs, steps=parse_steps(given.steps))
        try:
            output.write_bytes(page)
        except OSError as error:
            raise ConfigError(f"-o {output}: cannot be written: {error.strerror}") from error
    except CoatiError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    sys.stdout.write(f"{output}\n")
    return 0
