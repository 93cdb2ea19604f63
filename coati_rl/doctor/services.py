"""Check what a run starts: a program in the sandbox, and Ray with token authentication."""

import tempfile
import time
from pathlib import Path

from coati_rl.doctor.machine_check import Result
from coati_rl.errors import ConfigError
from coati_rl.sandbox import Limits, Sandbox, SandboxError
from coati_rl.text import shorten

_WITHOUT = "code rewards and --tools python alone need it; or score elsewhere with --code-verifier-api-url"
# It must see neither this machine's files nor a network: connecting a datagram socket sends nothing, and needs a route.
_PROGRAM = """
import os, socket
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    has_network = True
except OSError:
    has_network = False
print(6 * 7, os.path.exists({path!r}), has_network)
"""


def sandbox() -> Result:
    """Run a program in the sandbox, as code rewards do: bubblewrap, its namespaces, the supervisor."""
    limits, started = Limits(cpu_s=5.0, memory_bytes=512 * 2**20, most_wall_s=10.0), time.monotonic()
    try:
        with tempfile.NamedTemporaryFile() as file, Sandbox() as box:
            outcome = box.run(_PROGRAM.format(path=file.name), limits=limits)
    except (ConfigError, SandboxError) as error:
        return Result(status="warn", evidence=shorten(error, 300), remedy=_WITHOUT)
    seen = outcome.output.decode(errors="replace").split()
    if outcome.end != "exit" or outcome.code or seen[:1] != ["42"]:
        return Result(status="fail", evidence=f"a program that prints 42: {outcome.explain(limits)}", remedy=_WITHOUT)
    if seen[1:] != ["False", "False"]:
        return Result(
            status="fail",
            evidence="a program sees this machine's files or a network",
            remedy="report this: it should not",
        )
    return Result(
        status="ok",
        evidence=f"a program ran, without this machine's files and network, {time.monotonic() - started:.1f} s",
    )


def ray() -> Result:
    """Start Ray as a run does, on loopback with a token, and call a function in one of its processes."""
    from coati_rl.config.cli import build_config
    from coati_rl.processes.ray_environment import prepare_ray_environment

    started = time.monotonic()
    config = build_config({"device": "cpu"})
    prepare_ray_environment(config)  # before Ray is imported
    with tempfile.TemporaryDirectory(prefix="coati-", dir=tempfile.gettempdir(), ignore_cleanup_errors=True) as scratch:
        from coati_rl.runtime.trial import try_ray

        version, has_token = try_ray(config, Path(scratch))
    if not has_token:
        return Result(
            status="warn",
            evidence=f"Ray {version} runs without a token",
            remedy="unset RAY_AUTH_MODE, so that runs set it",
        )
    seconds = time.monotonic() - started
    return Result(status="ok", evidence=f"Ray {version} started, with a token, and ran a function in {seconds:.0f} s")
