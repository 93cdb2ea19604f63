"""Every attack is held, leaves nothing behind, and the next program in the same sandbox runs as ever."""

import os
import re
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewards.code.sandbox import Limits, Sandbox
from tests.integration.sandbox import (
    attacks_on_files,
    attacks_on_isolation,
    attacks_on_memory,
    attacks_on_processes,
    attacks_on_the_kernel,
    attacks_on_time,
    other_user,
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
MIB = 1 << 20


def by_name(attack: Attack) -> str:
    return attack.name


def free_inodes() -> dict[str, int]:
    return {folder: os.statvfs(folder).f_favail for folder in ("/tmp", "/dev/shm")}


def unowned_memory() -> int:
    """Bytes that are neither free or free to take, nor any living process's own: what programs can leave behind.

    The kernel keeps pages of ended processes for its next ones, core by core, and does not call them free.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    kept = re.findall(r"^ +count: +(\d+)$", Path("/proc/zoneinfo").read_text(encoding="utf-8"), re.MULTILINE)
    pages = sum(map(int, kept))
    return 1024 * (kib["MemTotal"] - kib["MemAvailable"] - kib["AnonPages"]) - pages * os.sysconf("SC_PAGESIZE")


def processes_of(user: int) -> list[int]:
    return [process.pid for process in psutil.process_iter() if user in (process.uids() or ())]


@pytest.fixture(scope="module")
def before(sandbox: Sandbox) -> dict[str, Any]:
    """The machine before the attacks."""
    return {"unowned_memory": unowned_memory(), "inodes": free_inodes(), "processes": own_processes()}


def test_there_are_enough_attacks_and_no_two_have_one_name() -> None:
    assert len({attack.name for attack in ALL}) == len(ALL) >= 60


@pytest.mark.parametrize("attack", ALL, ids=by_name)
def test_an_attack_is_held_and_leaves_nothing(
    attack: Attack, sandbox: Sandbox, target: Target, before: dict[str, Any]
) -> None:
    after = run_attack(sandbox, attack, target.places, LIMITS)
    said = after.outcome.output + after.outcome.error_output + after.outcome.returned
    assert end_of(after.outcome) in attack.ends, said[-2000:]
    assert attack.prints is None or after.outcome.output.decode() == attack.prints, said[-2000:]
    assert target.secret.encode() not in said
    assert max(map(len, (after.outcome.output, after.outcome.error_output))) <= LIMITS.output_bytes
    assert after.processes == before["processes"]  # bubblewrap and the warden, the same as ever
    assert target.sleeper.poll() is None
    assert after.next_output == b"next\n"


def test_after_all_attacks_memory_and_inodes_are_back_and_the_sandbox_is_idle(
    sandbox: Sandbox, before: dict[str, Any]
) -> None:
    time.sleep(2)
    own = [psutil.Process(pid) for pid in before["processes"]]
    used_s = sum(sum(process.cpu_times()[:2]) for process in own)
    time.sleep(1)
    assert sum(sum(process.cpu_times()[:2]) for process in own) - used_s < 0.02
    assert own_processes() == before["processes"]
    for folder, number in before["inodes"].items():
        assert os.statvfs(folder).f_favail > number - 5000, folder  # others use them too, a million would show
    assert unowned_memory() - before["unowned_memory"] < 300 * MIB


@pytest.mark.parametrize("attack", other_user.ATTACKS, ids=by_name)
def test_an_attack_is_held_as_well_when_the_sandbox_s_owner_is_not_root(
    attack: Attack, as_other_user: dict[str, dict[str, Any]], target: Target
) -> None:
    after = as_other_user[attack.name]
    assert after["user"] != 0
    assert after["end"] in attack.ends, after
    assert attack.prints is None or after["output"] == attack.prints, after
    assert target.secret not in after["output"] + after["error_output"]
    assert after["is_alone"]
    assert after["next_output"] == "next\n"


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
    assert found.output == b"[] [] False False False False [1]\nalone\n", found.error_output


def test_what_two_sandboxes_do_at_once_stays_apart(sandbox: Sandbox) -> None:
    meet = """
import os, time
open("/dev/shm/here", "w").close()
time.sleep(0.3)
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
"""
    with Sandbox() as other, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(one.run, meet, limits=LIMITS) for one in (sandbox, other)]
        assert [run.result().output for run in runs] == [b"[] ['here']\n"] * 2


def test_a_run_s_own_user_has_no_process_but_in_it(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import os; print(os.getuid())", limits=LIMITS)
    user = int(outcome.output)
    if user == 0:  # of a user namespace: the user who runs this
        return
    assert 60_000 <= user < 65_000
    assert processes_of(user) == []


def test_a_program_never_gets_the_rights_of_the_packages_owner(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import numpy; print(numpy.__file__)", limits=Limits())
    original = Path(sysconfig.get_path("purelib"), "numpy", "__init__.py")
    before = original.read_bytes()
    attack = f"open({outcome.output.decode().strip()!r}, 'a').write('raise SystemExit')"
    error = sandbox.run(attack, limits=LIMITS).error_output
    assert b"Read-only file system" in error or b"Permission denied" in error
    assert original.read_bytes() == before
