"""Run the mutation check: apply each listed one-line bug to a copy of the tree; its tests must fail there.

In: scripts/mutants/*.yaml. Out: a line per mutant, killed or survived; exit code 1 if one was not killed. The working
tree is not changed. Run: python scripts/mutants/run.py [-k WORD] [--jobs 2]

--emulated-gpu takes those of emulated_gpu/ instead, whose tests run under tests/emulated_gpu/run.sh alone.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent
OF_GPUS = LISTS / "emulated_gpu"
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; others mean that tests could not be collected or run
EXIT_CODES = 10  # added to pytest's exit code by the process that runs the tests
LIBRARIES = ["hypothesis", "numpy", "pydantic", "pytest", "torch", "transformers.models.qwen3.modeling_qwen3", "xxhash"]
BASELINE_TIMEOUT_S = 900.0  # for all killing tests in sequence

# "broken": pytest could not run the tests, which proves nothing.
Outcome = Literal["killed", "SURVIVED", "TIMEOUT", "BROKEN"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """Describe one bug and the tests that find it."""

    name: str  # unique
    file: str  # relative to the root
    old: str  # occurs exactly once in the file
    new: str
    killed_by: tuple[str, ...]  # node ids; one of them has to fail
    kills_by_timeout: bool = False  # a hang counts as killed
    full: bool = False  # its tests are outside of the fast suite

    def apply(self, text: str) -> str:
        """Return the file's text with the bug. Raises: ValueError unless its old text occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} holds its old text {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Hold the outcome of a mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    output: str  # of pytest


def load_mutants(directory: Path = LISTS) -> list[Mutant]:
    """Read all lists, sorted by file name."""
    entries = [entry for path in sorted(directory.glob("*.yaml")) for entry in yaml.safe_load(path.read_text("utf-8"))]
    return [Mutant(**{**entry, "killed_by": tuple(entry["killed_by"])}) for entry in entries]


def copy_tree(directory: Path) -> Path:
    """Copy the tracked files, as they are in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


def run_tests(tree: Path, tests: Sequence[str], *, full: bool, timeout_s: float) -> tuple[int | None, str]:
    """Run tests of a copy until one fails. Returns: pytest's exit code, None if it did not end in time; its output.

    They run in a fork of a process that has imported the large libraries, which takes longer than most tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    output = tree / "pytest-output.txt"
    process = context.Process(target=_run_pytest, args=(tree, ["--all", *tests] if full else tests, output))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
        return None, output.read_text("utf-8", errors="replace")
    return process.exitcode - EXIT_CODES, output.read_text("utf-8", errors="replace")


def _run_pytest(tree: Path, arguments: Sequence[str], output: Path) -> None:
    """Run the process's body. Exits with EXIT_CODES plus pytest's code; any other code is an internal error."""
    os.setsid()
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(tree)
    sys.path[:0] = paths = [str(tree), str(tree / "scripts")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that tests start

    import pytest

    marked = ["-m", "gpu"] if os.environ.get("COATI_EMULATED_GPU_HOME") else []
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *marked, *arguments])
    sys.stdout.flush()
    os._exit(EXIT_CODES + code)  # what a mutant has left behind may crash the interpreter's end


def judge(mutant: Mutant, code: int | None) -> Outcome:
    """Return the outcome for pytest's exit code; None: it did not end in time."""
    if code is None:
        return "killed" if mutant.kills_by_timeout else "TIMEOUT"
    return {TESTS_FAILED: "killed", TESTS_PASSED: "SURVIVED"}.get(code, "BROKEN")  # type: ignore[return-value]


def check_mutant(mutant: Mutant, tree: Path, *, timeout_s: float) -> Result:
    """Run the killing tests on a copy with the bug, then restore the file."""
    path, begin = tree / mutant.file, time.monotonic()
    original = path.read_text("utf-8")
    path.write_text(mutant.apply(original), "utf-8")
    try:
        code, output = run_tests(tree, mutant.killed_by, full=mutant.full, timeout_s=timeout_s)
    finally:
        path.write_text(original, "utf-8")
        if path.suffix == ".py":  # Python compares cached files by second and size, which two mutants may share
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
    return Result(mutant=mutant, outcome=judge(mutant, code), seconds=time.monotonic() - begin, output=output)


def check_all(mutants: Sequence[Mutant], trees: Sequence[Path], *, timeout_s: float) -> bool:
    """Check mutants concurrently, one on each copy, and print the outcomes. Returns: True if all were killed."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def check(mutant: Mutant) -> Result:
        tree = free.get()
        try:
            result = check_mutant(mutant, tree, timeout_s=timeout_s)
            # What proves nothing is tried once more: the server of forks has told another exit code than pytest's.
            is_broken = result.outcome == "BROKEN"
            return check_mutant(mutant, tree, timeout_s=timeout_s) if is_broken else result
        finally:
            free.put(tree)

    begin, num_killed = time.monotonic(), 0
    with ThreadPoolExecutor(len(trees)) as pool:
        try:
            for future in as_completed([pool.submit(check, mutant) for mutant in mutants]):
                result = future.result()
                num_killed += result.outcome == "killed"
                print(f"{result.outcome:<9}{result.seconds:6.1f} s  {result.mutant.name}", flush=True)
                if result.outcome in ("TIMEOUT", "BROKEN"):
                    print("".join(f"    {line}\n" for line in result.output.splitlines()[-15:]), end="", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"{num_killed} of {len(mutants)} mutants killed in {time.monotonic() - begin:.0f} s")
    return num_killed == len(mutants)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns: 0 if all mutants were killed, 1 if not, 2 if tests fail without them or none match."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", metavar="WORD", default="", help="only mutants with this in their name or file")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent mutants, each in its own copy (2)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="time limit of the tests of one mutant (120)")
    parser.add_argument("--emulated-gpu", action="store_true", help="bugs that only GPUs show, on emulated ones")
    arguments = parser.parse_args(argv)
    listed = load_mutants(OF_GPUS if arguments.emulated_gpu else LISTS)
    mutants = [mutant for mutant in listed if arguments.k in mutant.name or arguments.k in mutant.file]
    if not mutants:
        print(f"no mutant has {arguments.k!r} in its name or file", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [copy_tree(Path(scratch) / str(number)) for number in range(min(arguments.jobs, len(mutants)))]
        begin = time.monotonic()
        for full in sorted({mutant.full for mutant in mutants}):
            tests = list(dict.fromkeys(test for mutant in mutants if mutant.full == full for test in mutant.killed_by))
            code, output = run_tests(trees[0], tests, full=full, timeout_s=BASELINE_TIMEOUT_S)
            if code != TESTS_PASSED:
                print(f"{output}\nthe killing tests do not pass without a mutant", file=sys.stderr)
                return 2
            print(f"{len(tests)} killing tests pass without a mutant, in {time.monotonic() - begin:.0f} s", flush=True)
        return 0 if check_all(mutants, trees, timeout_s=arguments.timeout_s) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
