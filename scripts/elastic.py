"""Measure what producers that join and leave all the time cost a run: its throughput, its accuracy, its prompts.

    python scripts/elastic.py --model DIR [--minutes 10] [--steps 100] [--seeds 5] [--output elastic]

Every 30 s a producer joins over HTTP (`soak_joins.py`), and while two work one of them leaves. A producer has a known
pace: it samples one group at a time, and each answer is given GROUP_S seconds after its prompt, so that producers
share the processor without slowing each other down. Before the first join and after the last leave one producer is
alone: its groups a second, times the producers that were there at each moment, is what all should give together. The
same steps are then taken by undisturbed runs of other seeds, which do not wait. Prints the figures as JSON; exit code 1
if a prompt was lost or trained twice, or an accuracy or throughput falls short.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from soak_joins import JoinedProducers

from coati_rl.run_reader.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
EVENT_S = 30.0  # from one join, and one leave, to the next
GROUP_S = 2.0
PASSES, PER_STEP = 4, 8
ALONE_STEPS = 5  # before the first join
LEAST = 0.9  # of the summed throughput
_END_S = 120.0  # for a run to end after SIGTERM
JOB = (
    "-rt boxed -i 1 -ibs 8 -t 1 -tbs 8 -tMbs 8 -tmbs 16 -g 8 -mnt 32 -nb 1 --inflight-update -b transformers "
    "--kl-coeff 0 -lr 3e-4 --max-turns 1 --max-episode-tokens 512 -mpt 256"
)
ENVIRONMENT = '''
import asyncio
import time


class Paced:
    """End an episode so many seconds after its prompt; evaluations do not wait."""

    def __init__(self, group_s):
        self.group_s = group_s

    async def reset(self, task):
        self.until = time.monotonic() + self.group_s * (task.purpose == "train")

    async def step(self, action):
        await asyncio.sleep(max(0.0, self.until - time.monotonic()))
        return None, 0.0, True, {}
'''


class Run:
    """One run, and what it had done when."""

    def __init__(self, name: str, given: argparse.Namespace, flags: Sequence[str], environment: dict[str, str]) -> None:
        """Start it."""
        self.directory = given.output / name
        self._output = self.directory.with_suffix(".out")
        job = ["-m", str(given.model), "-d", str(given.output / "train.jsonl"), *JOB.split(), "-e", str(PASSES)]
        job += ["--eval-dataset", json.dumps({"arithmetic": f"{given.model}/eval.jsonl"}), "-ei", str(given.steps)]
        job += ["--env", f"{given.output / 'paced.py'}:Paced", *flags, "--run-dir", str(self.directory)]
        command = [sys.executable, str(ROOT / "rl_example.py"), *job]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
            )
        self.steps: list[float] = []  # when each was in metrics.jsonl
        self.presence: list[tuple[float, int]] = [(0.0, 1)]  # (since when, producers)

    def look(self) -> bool:
        """Note new steps, and producers that have come and gone. Returns: True while it runs."""
        is_running = self.process.poll() is None
        now, metrics = time.monotonic(), self.directory / "metrics.jsonl"
        num_steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        self.steps += [now] * (num_steps - len(self.steps))
        text = self._output.read_text(errors="replace")
        here = 1 + len(re.findall(r"^producer [1-9]\d* has joined", text, re.M))
        here -= len(re.findall(r"^producer [1-9]\d* (?:has left|lost)", text, re.M))
        if here != self.presence[-1][1]:
            self.presence.append((now, here))
        time.sleep(0.2)
        return is_running

    def close(self) -> None:
        """End it, if something else than its own end ends the measurement."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(_END_S)

    def rate(self, first: int, last: int) -> tuple[float, float]:
        """Return (groups a second, producers in the mean) from the end of one step to that of another."""
        begin, end = self.steps[first], self.steps[last]
        ends = [*(since for since, _ in self.presence[1:]), float("inf")]
        producer_s = sum(
            here * max(0.0, min(until, end) - max(since, begin))
            for (since, here), until in zip(self.presence, ends, strict=True)
        )
        return PER_STEP * (last - first) / (end - begin), producer_s / (end - begin)

    def found(self, num_steps: int) -> tuple[float, list[str]]:
        """Return the accuracy at the end, and what is wrong in the files."""
        run, name, code = RunDirectory(self.directory), self.directory.name, self.process.returncode
        problems = [f"{name}: exit code {code}"] if code else []
        trained = Counter((each.uid, each.sample) for each in run.rollouts() if each.is_trained)
        if twice := [key for key, times in trained.items() if times > 1]:
            problems.append(f"{name}: trained more than once: {twice[:5]}")
        if lost := num_steps * PER_STEP - len({uid for uid, _ in trained}):
            problems.append(f"{name}: {lost} prompts were lost")
        return run.evaluations()[-1]["accuracy"], problems


def disturbed(given: argparse.Namespace) -> tuple[Run, dict[str, Any], list[str]]:
    """Run while producers join and leave. Returns: the run, its figures, and what went wrong."""
    joined = JoinedProducers(given.model, given.output / "joined", random.Random(), at_most=4)
    flags = ["-imbs", "1", "--env-arg", f"group_s={GROUP_S}", *joined.flags]
    window: list[int] = []  # steps that were done at the first join, and after the last leave
    counts, problems = Counter[str](), list[str]()

    def leave() -> None:
        problem = joined.leave()
        counts["left"] += problem is not None
        problems.extend([problem] if problem else [])

    def change() -> None:
        window.append(len(run.steps) - 1)
        until = time.monotonic() + 60 * given.minutes
        while time.monotonic() < until and run.process.poll() is None:
            began = time.monotonic()
            counts["started"] += joined.join()
            if len(joined.admitted()) > 1:
                leave()
            time.sleep(max(0.0, began + EVENT_S - time.monotonic()))
        while joined.admitted():
            leave()
        window.append(len(run.steps))

    changes = threading.Thread(target=change, daemon=True)
    with closing(Run("disturbed", given, flags, joined.environment)) as run, ExitStack() as ends:
        ends.callback(joined.end)
        while run.look():
            if len(run.steps) > ALONE_STEPS and not changes.ident:
                changes.start()
        if not changes.ident:
            raise SystemExit(f"{run.directory} ended before the first join: see its output beside it")
        changes.join()
    seen = {"steps": run.steps, "presence": run.presence, "window": window}
    run.directory.with_suffix(".json").write_text(json.dumps(seen), encoding="utf-8")
    first, last, end = window[0], min(window[1], len(run.steps) - 1), len(run.steps) - 1
    together, producers = run.rate(first, last)
    alone = [run.rate(begin, until)[0] for begin, until in ((0, first), (last, end)) if until - begin > 2]
    ratio = together / (producers * sum(alone) / len(alone))
    if ratio < LEAST:
        problems.append(f"{ratio:.2f} of the summed throughput, {LEAST} is wanted")
    minutes = (run.steps[last] - run.steps[first]) / 60
    figures = {"minutes": minutes, "groups_per_s": together, "producers": producers, "alone_groups_per_s": alone}
    return run, {**counts, **figures, "of_the_summed_throughput": ratio}, problems


def main() -> int:
    """Run, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="with its data, as of scripts/make_tiny_model.py")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, help="of undisturbed runs")
    parser.add_argument("--output", type=Path, default=Path("elastic"))
    given = parser.parse_args()
    given.model, given.output = given.model.resolve(), given.output.absolute()
    if given.output.exists():
        parser.error(f"--output {given.output}: exists; give a directory that does not")
    given.output.mkdir(parents=True)
    (given.output / "paced.py").write_text(ENVIRONMENT, encoding="utf-8")
    with (given.model / "train.jsonl").open(encoding="utf-8") as rows:
        chosen = itertools.islice(rows, given.steps * PER_STEP // PASSES)
        (given.output / "train.jsonl").write_text("".join(chosen), encoding="utf-8")
    run, figures, problems = disturbed(given)
    accuracy, wrong = run.found(given.steps)
    problems += wrong
    undisturbed = []
    for seed in range(1, 1 + given.seeds):
        flags = ["-imbs", "8", "--env-arg", "group_s=0", "--seed", str(seed)]
        with closing(Run(f"seed-{seed}", given, flags, {})) as run:
            run.process.wait()
        found, wrong = run.found(given.steps)
        undisturbed.append(found)
        problems += wrong
    if undisturbed and not min(undisturbed) <= accuracy <= max(undisturbed):
        problems.append("the accuracy is not within those of the undisturbed runs")
    accuracies = {"accuracy": accuracy, "undisturbed_accuracies": undisturbed}
    print(json.dumps({**figures, **accuracies, "problems": problems}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
