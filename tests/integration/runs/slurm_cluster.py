"""Start the real SLURM on two nodes that are network namespaces of this machine: munged, slurmctld and two slurmd."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.integration.runs.two_nodes import ADDRESSES, TwoNamespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")  # of slurm-wlm
_START_S = 120.0
_CONF = """
ClusterName=two
SlurmctldHost={host}({head})
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPort=6817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MessageTimeout=60
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Two nodes of SLURM, which share all files."""

    def __init__(self) -> None:
        self.world = TwoNamespaces(as_root=True)
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        for name in ("state", "spool-node1", "spool-node2"):
            (self.directory / name).mkdir()
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        cores = os.cpu_count()
        nodes = "\n".join(
            f"NodeName=node{number} NodeHostname=node{number} NodeAddr={address} CPUs={cores} State=UNKNOWN"
            for number, address in enumerate(ADDRESSES, 1)
        )
        conf = self.directory / "slurm.conf"
        conf.write_text(
            _CONF.format(host=os.uname().nodename, head=ADDRESSES[0], directory=self.directory, nodes=nodes)
        )
        self.environment = {**self.world.environment, "SLURM_CONF": str(conf)}
        places = [
            f"--{name}={self.directory}/munge.{kind}"
            for name, kind in {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}.items()
        ]
        self.call("munged", f"--key-file={key}", *places, "--num-threads=2", "--force")
        self._serve("slurmctld", "-D")
        for node in (0, 1):
            self._serve("slurmd", "-D", "-N", f"node{node + 1}", "-b", node=node)
        deadline = time.monotonic() + _START_S
        while self.call("sinfo", "--noheader", "--format=%T %D").split() != ["idle", "2"]:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def call(self, *command: str, node: int = 0, cwd: Path = Path("/")) -> str:
        """Run a command on a node, and return what it prints."""
        done = subprocess.run(
            [*self.world.enter(node), "sh", "-c", 'cd "$0" && exec "$@"', cwd, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def _serve(self, *command: str, node: int = 0) -> None:
        """Start a daemon, which ends with the namespaces."""
        with (self.directory / f"{command[0]}-{node}.out").open("w") as output:
            subprocess.Popen(
                [*self.world.enter(node), *command], env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [*self.directory.glob("*.log"), *self.directory.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in paths)

    def end(self) -> None:
        """Kill everything in the namespaces."""
        self.world.end()
        shutil.rmtree(self.directory, ignore_errors=True)
