"""Have a script measure in the environment of a CPU trainer's process, which glibc reads when a process starts."""

import os
import sys

from consumer.environment import memory_environment


def run_as_trainer() -> None:
    """Start the calling script anew with a trainer's variables, unless it has them; to be called before anything else.

    The rank of a trainer in one process, without FSDP2; what a script compares with it has the same variables.
    """
    variables = memory_environment("cpu", "hybrid")
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)
