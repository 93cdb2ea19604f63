"""Create two nodes on one machine: connected network namespaces, where wanted with a raylet of one Ray cluster each.

Nothing in them is reached from outside, and their loopbacks are not each other's: whoever gives away a wrong address is
not found. Processes, the file system and the cores are shared. Needs no rights but those of making user namespaces.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.integration.runs.conftest import ROOT, Run

ADDRESSES = ("10.231.0.1", "10.231.0.2")
_START_S = 240.0  # for a raylet on a busy machine; it takes 5 s on an idle one
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_OWN_USERS = ("--user", "--map-root-user")
_SETUP = f"""
set -e
ip link set lo up
unshare --net bash -c 'exec -a second-node sleep infinity' & second=$!
while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add cable0 type veth peer name cable1 netns $second
ip addr add {ADDRESSES[0]}/24 dev cable0
ip link set cable0 up
nsenter --net=/proc/$second/ns/net sh -ec 'ip link set lo up
    ip addr add {ADDRESSES[1]}/24 dev cable1
    ip link set cable1 up'
echo ready
wait
"""


class TwoNamespaces:
    """The namespaces."""

    def __init__(self, *, as_root: bool = False) -> None:
        """`as_root`: with the rights of root outside of them, which daemons that change users need."""
        self._own_users = not as_root
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._world = subprocess.Popen(
            [*_UNSHARE, *(_OWN_USERS if self._own_users else ()), "bash", "-c", _SETUP],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._world.stdout is not None
        assert self._world.stdout.readline() == "ready\n", "no namespaces: unshare, nsenter and ip are needed"
        (init,) = psutil.Process(self._world.pid).children()
        (second,) = (child for child in init.children() if child.cmdline()[0] == "second-node")
        self._holders = (init, second)

    def enter(self, node: int) -> list[str]:
        """The beginning of a command line that runs on a node."""
        users = ["--user"] if self._own_users else []
        return ["nsenter", "-t", str(self._holders[node].pid), *users, "--net", "--pid", "--mount"]

    def processes(self, node: int, name: str = "") -> list[psutil.Process]:
        """Those of a node whose command line contains `name`."""
        found = []
        network = _network(self._holders[node])
        for process in self._holders[0].children(recursive=True):
            try:
                if _network(process) == network and name in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.Error, OSError):  # it ended while we looked
                continue
        return [process for process in found if process != self._holders[1]]

    def end(self) -> None:
        """Kill everything in the namespaces, which end with it."""
        family = self._holders[0].children(recursive=True)
        self._world.kill()
        self._world.wait(30)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []


class TwoNodes(TwoNamespaces):
    """The namespaces, and a head in the first; the second node comes and goes."""

    def __init__(self, num_cpus: int) -> None:
        """`num_cpus`: of the head."""
        super().__init__()
        self._scratch = Path(tempfile.mkdtemp(prefix="two-"))
        token = self._scratch / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._scratch}/ray")
        self._start_ray(0, num_cpus, *head)

    def join(self, num_cpus: int) -> None:
        """Start the second node anew."""
        for process in self.processes(1):
            process.kill()
        self._start_ray(1, num_cpus, f"--address={ADDRESSES[0]}:6379")

    def _start_ray(self, node: int, num_cpus: int, *more: str) -> None:
        sizes = (f"--num-cpus={num_cpus}", "--num-gpus=0", f"--object-store-memory={100 * 2**20}")
        flags = (f"--node-ip-address={ADDRESSES[node]}", *sizes, "--disable-usage-stats", *more)
        result = subprocess.run(
            [*self.enter(node), Path(sys.executable).with_name("ray"), "start", *flags],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_START_S,
            text=True,
        )
        assert result.returncode == 0, result.stdout

    def run(self, arguments: list[object], run_dir: Path) -> "RunOnTwoNodes":
        """Start the command line on the first node."""
        return RunOnTwoNodes(self, [str(argument) for argument in arguments], run_dir)

    def end(self) -> None:
        """Kill everything in the namespaces, and remove Ray's files."""
        super().end()
        shutil.rmtree(self._scratch, ignore_errors=True)


class RunOnTwoNodes(Run):
    """A run of rl_example.py whose driver is on the first node."""

    def __init__(self, nodes: TwoNodes, arguments: list[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".out")
        self._nodes = nodes
        command = [sys.executable, str(ROOT / "rl_example.py"), *arguments, "--run-dir", str(run_dir)]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*nodes.enter(0), *command, "--master_address", ADDRESSES[0], "--device", "cpu"],
                env=nodes.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def interrupt(self) -> None:
        """Ctrl-C. The subreaper is the child of nsenter, which passes no signals on."""
        for subreaper in psutil.Process(self.process.pid).children():
            subreaper.send_signal(signal.SIGINT)

    def actors(self, within_s: float = 30) -> list[str]:
        """Actors and drivers that are still on either node, when they have had time to end."""
        deadline = time.monotonic() + within_s
        while True:
            names = [f"{kind} on {node}" for node in (0, 1) for kind in _OURS if self._nodes.processes(node, kind)]
            if not names or time.monotonic() > deadline:
                return names
            time.sleep(0.2)


_OURS = ("ray::ProducerActor", "ray::TrainerActor", "ray::CoordinatorActor", "rl_example.py")


def _network(process: psutil.Process) -> int:
    """The number of its network namespace."""
    return os.stat(f"/proc/{process.pid}/ns/net").st_ino
