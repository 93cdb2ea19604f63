"""Measure what a terminal's block costs the driver, in CPU time, against plain lines.

    python scripts/bench/terminal_block.py [--seconds 20] [--steps-per-s 1] [--rounds 3] [--json FILE]

Each round displays the same records in the same time, first as plain lines and then in the block, on a pseudo-terminal
of 100 columns that another process reads: a step's record, and a status four times a second. Counted is the CPU time of
the displaying process, all threads, per second of the run; medians over the rounds.
"""

import argparse
import fcntl
import json
import os
import pty
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay
from coati_rl.observability.sampled_answer import SampledAnswer

POLL_S = 0.25  # as the supervisor's
COLUMNS, ROWS = 100, 40
RECORD = {
    **{"event": "step", "reward_mean": 0.5, "answer_accuracy": 0.25, "loss": 0.1, "num_response_tokens": 8000},
    **{"step_s": 1.0, "staleness_mean": 0.5, "logprob_gap_mean": 1e-7},
    **{"trainer_idle_fraction": 0.5, "producer_idle_fraction": 0.2},
}
ANSWER = SampledAnswer(
    step=1, prompt="What is 17 + 25? " * 8, answer="17 + 25 = \\boxed{42} " * 8, truth="42", reward=1.0, verdict="ok"
)


def cpu_share(*, is_plain: bool, seconds: float, steps_per_s: float) -> float:
    """Return the CPU seconds per second of a display."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    reader = os.fork()
    if reader == 0:
        os.close(slave)
        with suppress(OSError):  # the other end is closed
            while os.read(master, 65536):
                pass
        os._exit(0)
    os.close(master)
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        display = ProgressDisplay(None, Console(file=terminal), is_plain=is_plain)
        with display:
            display.show_answer(ANSWER)
            used, begin, step = time.process_time(), time.monotonic(), 0
            while (passed := time.monotonic() - begin) < seconds:
                while step < passed * steps_per_s:
                    step += 1
                    display.show({**RECORD, "step": step, "reward_mean": step % 37 / 37})
                display.show_wait(f"waiting for rollouts: {step % 8} of 8 groups of step {step} are finished")
                time.sleep(POLL_S)
            used = time.process_time() - used
    os.waitpid(reader, 0)
    return used / passed


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each display")
    parser.add_argument("--steps-per-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shares: dict[str, list[float]] = {"plain": [], "block": []}
    for _ in range(given.rounds):
        for name, values in shares.items():
            values.append(cpu_share(is_plain=name == "plain", seconds=given.seconds, steps_per_s=given.steps_per_s))
    print(f"{given.steps_per_s:g} steps/s   CPU ms per second of the run, of {given.rounds} rounds: median (all)")
    for name, values in shares.items():
        print(f"{name}  {1000 * median(values):.2f}  ({', '.join(f'{1000 * each:.2f}' for each in values)})")
    if given.json:
        given.json.write_text(json.dumps({"arguments": vars(given) | {"json": None}, "cpu_share": shares}) + "\n")


if __name__ == "__main__":
    main()
