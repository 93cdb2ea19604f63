"""Test that every attack is contained and leaves nothing, and that the sandbox then runs the next program."""

import os
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from coati_rl.sandbox import Limits, Sandbox
from tests.integration.sandbox import (
    attacks_on_files,
    attacks_on_isolation,
    attacks_on_memory,
    attacks_on_processes,
    attacks_on_the_kernel,
    attacks_on_time,
)
from tests.integration.sandbox.attack import Attack
from tests.integration.sandbox.conftest import LIMITS, Target
from tests.integration.sandbox.running import end_of, own_processes, run_attack

ON_RESOURCES = (
    *attacks_on_processes.ATTACKS,
    *attacks_on_time.ATTACKS,
    *attacks_on_memory.ATTACKS,
    *attacks_on_files.ATTACKS,
)
ON_ISOLATION = (*attacks_on_isolation.ATTACKS, *attacks_on_the_kernel.ATTACKS)
ALL = (*ON_ISOLATION, *ON_RESOURCES)
TAKE_SECONDS = {  # each of CPU time
    "as many small mappings as there can be, in every child",
    "endless recursion without a limit",
    "ever longer list",
    "gzip bomb",
}
LEFT_TO_ALL = {each.name for each in ON_RESOURCES[1::2]} | TAKE_SECONDS
MIB = 1 << 20


def by_name(attack: Attack) -> str:
    return attack.name


def mounts(process: int) -> list[str]:
    return Path(f"/proc/{process}/mountinfo").read_text(encoding="utf-8").splitlines()


def num_descriptors(processes: Sequence[int]) -> list[int]:
    return [psutil.Process(process).num_fds() for process in processes]


def resident_bytes(processes: Sequence[int]) -> int:
    return sum(psutil.Process(process).memory_info().rss for process in processes)


def owned_by(user: int) -> list[str]:
    """Return a user's files in the machine's world-writable folders."""
    folders = ("/tmp", "/var/tmp", "/dev/shm")
    found = []
    for entry in (entry for folder in folders for entry in os.scandir(folder)):
        with suppress(FileNotFoundError):  # somebody else's, removed by now
            if entry.stat(follow_symlinks=False).st_uid == user:
                found.append(entry.path)
    return found


@pytest.fixture(scope="module")
def before(sandbox: Sandbox) -> dict[str, Any]:
    """The sandbox before the attacks: all that could hold memory or files of theirs is its own."""
    processes = own_processes()
    return {
        "processes": processes,
        "mounts": mounts(processes[-1]),
        "descriptors": num_descriptors(processes),
        "resident_bytes": resident_bytes(processes),
    }


def test_there_are_enough_attacks_and_no_two_have_one_name() -> None:
    assert len({attack.name for attack in ALL}) == len(ALL) >= 60


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=[pytest.mark.full] * (each.name in LEFT_TO_ALL)) for each in ALL],
    ids=by_name,
)
def test_an_attack_is_held_and_leaves_nothing(
    attack: Attack, sandbox: Sandbox, target: Target, before: dict[str, Any]
) -> None:
    after = run_attack(sandbox, attack, target.places)
    said = after.outcome.output + after.outcome.error_output + after.outcome.returned
    assert end_of(after.outcome) in attack.ends, said[-2000:]
    assert attack.prints is None or after.outcome.output.decode() == attack.prints, said[-2000:]
    assert target.secret.encode() not in said
    assert max(map(len, (after.outcome.output, after.outcome.error_output))) <= attack.limits.output_bytes
    assert after.processes == before["processes"]  # bubblewrap and the supervisor, the same as ever
    assert target.sleeper.poll() is None
    assert after.next_output == b"next\n"


def test_after_all_attacks_nothing_holds_memory_or_files_and_the_sandbox_is_idle(
    sandbox: Sandbox, before: dict[str, Any]
) -> None:
    processes = own_processes()
    assert processes == before["processes"]
    assert mounts(processes[-1]) == before["mounts"]
    assert num_descriptors(processes) == before["descriptors"]
    assert resident_bytes(processes) - before["resident_bytes"] < 30 * MIB
    own = [psutil.Process(pid) for pid in processes]
    used_s = sum(sum(process.cpu_times()[:2]) for process in own)
    time.sleep(0.5)
    assert sum(sum(process.cpu_times()[:2]) for process in own) - used_s < 0.02


def test_nothing_of_an_earlier_program_is_left(sandbox: Sandbox) -> None:
    leave = """
import builtins, json, os, sys, time
for folder in ("/tmp", "/dev/shm"):
    os.makedirs(f"{folder}/kept/deep")
    open(f"{folder}/kept/file", "w").write("mine")
os.environ["LEFT"] = "mine"
builtins.left = sys.left = json.left = "mine"
json.dumps = print
if os.fork() == 0:
    os.setsid()
    time.sleep(100)
"""
    look = """
import builtins, json, os, sys
print(os.listdir("/tmp"), os.listdir("/dev/shm"), "LEFT" in os.environ, hasattr(builtins, "left"), hasattr(sys, "left"),
    hasattr(json, "left"), json.dumps([1]))
try:
    os.kill(2, 0)
except ProcessLookupError:
    print("alone")
"""
    assert sandbox.run(leave, limits=LIMITS).end == "exit"
    found = sandbox.run(look, limits=LIMITS)
    assert found.output == b"['solution.py'] [] False False False False [1]\nalone\n", found.error_output


def test_what_two_sandboxes_do_at_once_stays_apart(sandbox: Sandbox) -> None:
    meet = """
import os, time
open("/dev/shm/here", "w").close()
time.sleep(0.3)
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
"""
    with Sandbox() as other, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(one.run, meet, limits=LIMITS) for one in (sandbox, other)]
        assert [run.result().output for run in runs] == [b"['solution.py'] ['here']\n"] * 2


def test_what_a_run_s_own_user_has_is_gone_with_the_run(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import os; open('/tmp/x', 'w'); open('/dev/shm/x', 'w'); print(os.getuid())", limits=LIMITS)
    user = int(outcome.output)
    if user == 0:  # of a user namespace: the user who runs this
        return
    assert user == 60_000 + os.getpid() % 5_000
    assert [pid for pid in own_processes() if psutil.Process(pid).uids().real == user] == []
    assert owned_by(user) == []


def test_a_program_never_gets_the_rights_of_the_packages_owner(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import numpy; print(numpy.__file__)", limits=Limits())
    original = Path(sysconfig.get_path("purelib"), "numpy", "__init__.py")
    before = original.read_bytes()
    attack = f"open({outcome.output.decode().strip()!r}, 'a').write('raise SystemExit')"
    error = sandbox.run(attack, limits=LIMITS).error_output
    assert b"Read-only file system" in error or b"Permission denied" in error
    assert original.read_bytes() == before
