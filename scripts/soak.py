"""Run for some minutes with faults at random, and check what the run's files hold.

    python scripts/soak.py MINUTES --model DIR [--seed 0] [--run-dir DIR] [-- FLAGS OF rl_example.py]

Each few seconds a process of the run is killed (producer, coordinator; trainer; all of them at once) or stopped for a
while (producer, coordinator, all), a producer joins, leaves or is killed (`soak_joins.py`), or the run's machine has a
slow disk (an fsync takes seconds), a clock that is set (by up to an hour, and back), or a full /dev/shm
(`soak_faults.py`). Faults begin with the first checkpoint; a run that has ended with a trainer is resumed from its
newest one. At the end the run is interrupted, and its directory alone says whether each sample was trained at most
once, whether every step has its record and its rollouts, and whether staleness stayed within --n-behind. The data are
so few rows (--prompts) that they are passed many times: a pass that is over and lacks a row has lost a prompt. Prints
the counts as JSON; exit code 1 if anything is not as it should be.
"""

import argparse
import collections
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from soak_faults import MachineFaults
from soak_joins import JoinedProducers

from coati_rl.run_reader.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
ACTORS = {"producer": "ray::ProducerAct", "coordinator": "ray::Coordinator", "trainer": "ray::TrainerAct"}
# Fault -> its weight. What ends a run costs a start, so it is rarer.
FAULTS = {
    "kill producer": 6,
    "stop producer": 3,
    "kill coordinator": 6,
    "stop coordinator": 3,
    "stop all": 2,
    "slow disk": 3,
    "set clock": 3,
    "fill shm": 2,
    "join joined": 5,
    "leave joined": 3,
    "kill joined": 2,
    "kill trainer": 1,
    "kill all": 1,
}
PAUSE_S = (4.0, 15.0)  # between two faults
STOP_S = (2.0, 12.0)  # for which processes are stopped
END_S = 180.0  # for a run to end after SIGINT
JOB = "-rt boxed -i 2 -ibs 8 -imbs 4 -t 1 -tbs 8 -tMbs 8 -tmbs 8 -g 4 -mnt 16 -nb 1 -si 3 -e 1000 -b transformers"


class Soak:
    """One run, over as many starts as its faults cost."""

    def __init__(self, model: Path, run_dir: Path, flags: Sequence[str], *, seed: int, num_prompts: int) -> None:
        """Take the job, and write its data beside the run; nothing is started."""
        self._run_dir, self._rng = run_dir, random.Random(seed)
        self._machine = MachineFaults(run_dir.with_suffix(".faults"), self._rng)
        self._joined = JoinedProducers(model, run_dir.with_suffix(".joined"), self._rng)
        data = run_dir.with_suffix(".jsonl")
        with (model / "train.jsonl").open(encoding="utf-8") as rows:
            data.write_text("".join(itertools.islice(rows, num_prompts)), encoding="utf-8")
        job = ["-m", str(model), "-d", str(data), *JOB.split(), *self._joined.flags, *flags]
        self._command = [sys.executable, str(ROOT / "rl_example.py"), *job, "--run-dir", str(run_dir)]
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def run(self, seconds: float) -> None:
        """Run with faults for so long, then interrupt."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._started() as process:
                while process.poll() is None and time.monotonic() < deadline:
                    self._pause(process, self._rng.uniform(*PAUSE_S))
                    if process.poll() is None and self._has_begun():
                        self._fault(process)
                if process.poll() is None:
                    self._ends_expected |= {0, 130}
                    process.send_signal(signal.SIGINT)
                self._note_end(process.wait(END_S))
            if self.problems and not self._has_begun():  # a wrong flag: another start would end as this one did
                return

    @contextlib.contextmanager
    def _started(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Start the run, or resume it; end what is left of it."""
        resume = ["-cp", str(self._run_dir)] if self.counts["starts"] else []
        self.counts["starts"] += 1
        self._ends_expected = {0, 130}
        command = self._machine.command([*self._command, *resume])
        with self._run_dir.with_suffix(".out").open("ab") as output:
            environment = {**self._machine.environment, **self._joined.environment}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            for each in self._family(process):
                _send(each, signal.SIGKILL)
            self._joined.end()

    def _note_end(self, code: int) -> None:
        self.counts[f"exit code {code}"] += 1
        if code not in self._ends_expected:
            text = self._run_dir.with_suffix(".out").read_text(errors="replace").splitlines()[-3:]
            self.problems.append(f"exit code {code}: {' | '.join(text)}")

    def _fault(self, process: "subprocess.Popen[bytes]") -> None:
        (fault,) = self._rng.choices([*FAULTS], weights=[*FAULTS.values()])
        what, whom = fault.split()
        if what in ("slow", "set", "fill"):
            self.counts[fault] += 1
            self._change_machine(what, process)
            return
        if whom == "joined":
            self._change_joined(what, process)
            return
        family = self._family(process)
        chosen = family if whom == "all" else [each for each in family if _name(each).startswith(ACTORS[whom])]
        if not chosen:
            return
        if whom == "producer":
            chosen = [self._rng.choice(chosen)]
        self.counts[fault] += 1
        if what == "kill":
            if whom in ("trainer", "all"):
                self._ends_expected = {1, -signal.SIGKILL}
            for each in chosen:
                _send(each, signal.SIGKILL)
            return
        for each in chosen:
            _send(each, signal.SIGSTOP)
        time.sleep(self._rng.uniform(*STOP_S))
        for each in chosen:
            _send(each, signal.SIGCONT)

    def _change_machine(self, what: str, process: "subprocess.Popen[bytes]") -> None:
        if what == "slow":
            self._machine.slow_disk()
        elif what == "set":
            self._machine.set_clock()
        else:
            self._machine.fill_shm(process.pid)

    def _change_joined(self, what: str, process: "subprocess.Popen[bytes]") -> None:
        if what == "leave":
            problem = self._joined.leave()
            is_done = problem is not None
            if problem and process.poll() is None:  # the run is still there to take the prompts back
                self.problems.append(problem)
        else:
            is_done = self._joined.join() if what == "join" else self._joined.kill()
        self.counts[f"{what} joined"] += is_done

    def _has_begun(self) -> bool:
        """Return True if there is a checkpoint: a run without one could only be begun again."""
        return any((self._run_dir / "checkpoints").glob("step-*/manifest.json"))

    @staticmethod
    def _pause(process: "subprocess.Popen[bytes]", seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)

    @staticmethod
    def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            here = psutil.Process(process.pid)
            return [*here.children(recursive=True), here]
        return []


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def found_in(run_dir: Path, *, n_behind: int, num_prompts: int) -> tuple[dict[str, Any], list[str]]:
    """Check the invariants from the files of a run. Returns: counts, and what does not hold."""
    run = RunDirectory(run_dir)
    steps = run.steps()
    numbers = [step["step"] for step in steps]
    problems = [] if numbers == [*range(1, len(numbers) + 1)] else ["steps are not 1, 2, 3, ... in metrics.jsonl"]
    trained: collections.Counter[tuple[str, int]] = collections.Counter()
    steps_with_rollouts, producers = set(), set()
    for rollout in run.rollouts():
        steps_with_rollouts.add(rollout.step)
        producers.add(rollout.line["producer"])
        trained[rollout.uid, rollout.sample] += rollout.is_trained
    twice = [key for key, times in trained.items() if times > 1]
    problems += [f"trained more than once: {twice[:5]}"] if twice else []
    if without := {*numbers} - steps_with_rollouts:
        problems.append(f"steps without rollouts: {sorted(without)[:5]}")
    if stale := [step["step"] for step in steps if (step.get("staleness_max") or 0) > n_behind]:
        problems.append(f"steps with samples older than {n_behind} weight syncs: {stale[:5]}")
    sizes = pass_sizes(uid for uid, _ in trained)
    if lost := {number: size for number, size in enumerate(sizes[:-2]) if size != num_prompts}:
        problems.append(f"passes that are over, by their number of prompts, which is not {num_prompts}: {lost}")
    gaps = [sync["probe_gap_max"] for sync in run.syncs() if sync["probe_gap_max"] is not None]
    counts = {
        "steps": len(steps),
        "prompts": len({uid for uid, _ in trained}),
        "passes_that_are_over": len(sizes[:-2]),
        "samples_trained": sum(trained.values()),
        "samples_trained_twice": len(twice),
        "producers_whose_samples_are_trained": len(producers),
        "weight_syncs": len(gaps),
        "probe_gap_max": max(gaps, default=None),
        "takeovers": run_dir.with_suffix(".out").read_text(errors="replace").count("\nthe coordinator was lost; "),
    }
    return counts, problems


def pass_sizes(uids: Iterable[str]) -> list[int]:
    """Return how many prompts each pass over the data has, the first one first; the last two may not be over."""
    passes = collections.Counter(int(uid.rpartition(".")[2]) for uid in {*uids})
    return [passes[number] for number in range(max(passes, default=-1) + 1)]


def main() -> int:
    """Run, check, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--model", type=Path, required=True, help="with train.jsonl, as of scripts/make_tiny_model.py")
    parser.add_argument("--run-dir", type=Path, default=Path("soak"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=32, help="rows of the data, which is passed again and again")
    parser.add_argument("flags", nargs="*", help="more flags of rl_example.py, behind --")
    given = parser.parse_args()
    run_dir = given.run_dir.absolute()
    if run_dir.exists():
        parser.error(f"--run-dir {run_dir}: exists; a soak begins a run of its own")
    soak = Soak(given.model.resolve(), run_dir, given.flags, seed=given.seed, num_prompts=given.prompts)
    soak.run(60 * given.minutes)
    counts: dict[str, Any] = {}
    problems = soak.problems or ["no run began"]
    if (run_dir / "config.yaml").is_file():
        counts, found = found_in(run_dir, n_behind=1, num_prompts=given.prompts)
        problems = [*soak.problems, *found]
    print(json.dumps({"faults": dict(soak.counts), **counts, "problems": problems}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
