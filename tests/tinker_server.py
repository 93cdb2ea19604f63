"""Run `coati-rl tinker-serve` in a process that can die at a chosen call of its parts:

    TINKER_TEST_DIE_AT=CALL:NUMBER python -m tests.tinker_server --model NAME=DIRECTORY --root ROOT ...

kills the server, as a power cut would, before the n-th call of a name of the training or the sampling part.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coati.tinker_serve import make_base
from coati_rl.tinker.bases import Base
from coati_rl.tinker.command import Parts, run_command


class _Death:
    """Kill this process before the n-th call of a name."""

    def __init__(self, text: str) -> None:
        self._name, _, number = text.partition(":")
        self._number, self._calls = int(number or 0), Counter[str]()

    def __call__(self, name: str) -> None:
        self._calls[name] += 1
        if name == self._name and self._calls[name] == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


class _Mortal:
    """Stand for a part, and tell of each call before it is made."""

    def __init__(self, part: Any, before_call: Callable[[str], None]) -> None:
        self._part, self._before_call = part, before_call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._before_call(name)
            return found(*arguments, **named)

        return call


def mortal_base(name: str, directory: Path, parts: Parts) -> Base:
    torch.set_num_threads(1)
    base, death = make_base(name, directory, parts), _Death(os.environ.get("TINKER_TEST_DIE_AT", ""))
    return replace(base, training=_Mortal(base.training, death), sampling=_Mortal(base.sampling, death))


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], mortal_base))
