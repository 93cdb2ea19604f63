"""Print what a replay finds, stage by stage: `coati-rl replay RUN --step N`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.flag_numbers import integer_from
from coati_rl.replay.parts import Parts
from coati_rl.replay.replay import Replay
from coati_rl.replay.stage import ReplayStage, conclusion, first_difference
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.text import printable

_PROG = "coati-rl replay"


def run_command(arguments: Sequence[str] | None, parts: Callable[[], Parts]) -> int:
    """Run the command. Returns: the exit code: 0 if no stage differs, 1 if one does, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run, also of one that goes on")
    parser.add_argument("--step", type=integer_from(1), required=True, help="optimizer step, from 1")
    parser.add_argument("--sample", metavar="UID", help="check the rollouts of this prompt alone, as the lines name it")
    parser.add_argument(
        "--ratios", action="store_true", help="write the ratio of each token beside the run, for coati-rl report"
    )
    given = parser.parse_args(arguments)
    stages = list[ReplayStage]()
    try:
        if given.ratios and given.sample is not None:
            raise ConfigError("--ratios: is of the whole step; leave --sample out")
        replay = Replay(RunDirectory(given.run), parts(), with_ratios=given.ratios)
        for stage in replay.stages(given.step, given.sample):
            stages.append(stage)
            _print(stage.line)
        if given.ratios:
            _print(f"ratios of the tokens: {replay.write_ratios(given.step)}")
    except CoatiError as error:
        sys.stderr.write(f"{_PROG}: {printable(str(error))}\n")
        return 2
    _print(f"step {given.step}: {conclusion(stages)}")
    return 0 if first_difference(stages) is None else 1


def _print(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()
