"""Run `coati-rl tinker-serve` with the reference training part in place of the project's own:

    python -m tests.tinker_server --model NAME=DIRECTORY --root ROOT ...

TINKER_TEST_DIE_AT=CALL:NUMBER kills the server before the n-th call of a name of the training part.
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch

from coati_rl.tinker.bases import Base
from coati_rl.tinker.command import Parts, run_command
from producer.samplers.transformers_samplers import TransformersSamplers
from tests.reference_training import ReferenceTraining


class _Death:
    """Kill this process, as a power cut would, before the n-th call of a name."""

    def __init__(self, text: str) -> None:
        self._name, _, number = text.partition(":")
        self._number, self._calls = int(number or 0), Counter[str]()

    def __call__(self, name: str) -> None:
        self._calls[name] += 1
        if name == self._name and self._calls[name] == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


def reference_base(name: str, directory: Path, _: Parts | None = None) -> Base:
    torch.set_num_threads(1)
    training = ReferenceTraining(directory, before_call=_Death(os.environ.get("TINKER_TEST_DIE_AT", "")))
    sampling = TransformersSamplers(directory, max_tokens=training.max_tokens)
    return Base(name=name, directory=directory, arch="qwen3", training=training, sampling=sampling)


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], reference_base))
