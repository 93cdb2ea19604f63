"""Configure all tests: one thread per process, cases outside of the fast suite, tests that need a GPU.

Cases marked `full` run with --all only, and of those marked `sampled(n)` the fast suite has the first of each n: it has
one representative of each guarantee, docs/testing.md says which. Tests marked `gpu` are skipped unless `-m gpu` chooses
them on a machine with one; nothing else is ever skipped.
"""

import gc
import importlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# Their conftest refuses to run without the emulator of scripts/test.sh --emulated-gpu.
collect_ignore = [] if os.environ.get("COATI_EMULATED_GPU_HOME") else ["emulated_gpu"]
TIMEOUTS_S = {"tests/faults/": 900, "tests/integration/runs/": 900}  # elsewhere pyproject.toml's
SHARING = (
    *(f"tests/integration/{name}/" for name in ("consumer", "engines", "tinker")),
    *("tests/unit/algorithms/test_peer", "tests/unit/engines/test_vllm_", "tests/unit/transport/"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those that are marked; draw the same examples in each run of the fast suite.

    Tests of the CPU see none, whatever the machine has. New examples are drawn with --all, so that a change is never
    refused for an old bug that chance found in it.
    """
    if not _uses_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings.register_profile("the same each time", derandomize=True)
    if not config.getoption("--all"):
        settings.load_profile("the same each time")


def _uses_gpus(config: pytest.Config) -> bool:
    return "gpu" in (config.getoption("markexpr") or "")


# Before anything imports torch: with two threads each on two cores, processes are many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs under test inherit what this process ignores: SIGINT and SIGQUIT if a shell without job control started it in
# the background, SIGHUP under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the cases that the fast suite leaves out (marked full)")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep the garbage collector from what is collected: 700,000 objects of modules and tests that stay to the end.

    It walks them again and again otherwise: a quarter of the time to collect, two seconds at the interpreter's end, and
    time in each test that calls it.
    """
    gc.disable()
    try:
        _import_a_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_a_share(config: pytest.Config) -> None:
    """Rewrite the assertions of as many files as each other of xdist's processes does, all of which collect all files.

    What one has rewritten the others read from the cache of bytecode; each would rewrite all of them at the same time.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != ["tests"]:
        return
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        if file.parts[1] not in collect_ignore:
            importlib.import_module(".".join(file.with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Asks torch for a GPU only when a test needs one: importing it takes seconds."""
    if not config.getoption("--all"):
        left_out = left_to_all(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        for folder, timeout_s in TIMEOUTS_S.items():
            if item.nodeid.startswith(folder) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(timeout_s))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and -m gpu"))


def left_to_all(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items that are marked `full`, and of the other cases of each test that is `sampled` all but some."""
    left_out: set[pytest.Item] = set()
    seen: Counter[str] = Counter()  # cases of a test
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if item.get_closest_marker("full"):
            left_out.add(item)
        elif sampled:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sampled.args[0]:
                left_out.add(item)
            seen[test] += 1
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw what a test leaves to chance from the same seed, so that it has the same weights in any order of tests."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        seed = torch.manual_seed if _uses_gpus(item.config) else torch.default_generator.manual_seed  # 0.4 ms less
        seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to a process, and those together that share engines, servers or imports that take long."""
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in SHARING if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return ByWhatIsShared(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long the tests of each folder took, fixtures included."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("::")[0].split("/")[:-1])] += report.duration
    if seconds:
        terminalreporter.section("minutes per folder")
        for folder, time_s in seconds.most_common():
            terminalreporter.write_line(f"{time_s / 60:6.2f}  {folder}")
