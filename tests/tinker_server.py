"""Run a server of Tinker's API on the reference training part, as a process:

    python -m tests.tinker_server ROOT PORT --model NAME=DIRECTORY [--key NAME=KEY] [--die-at CALL:NUMBER]
"""

import argparse
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
import uvicorn

from coati_rl.processes.http_server import listen, server_config, url_of
from coati_rl.tinker.app import make_app
from coati_rl.tinker.bases import Base
from coati_rl.tinker.limits import Keys, Limits
from coati_rl.tinker.service import Service
from producer.samplers.transformers_samplers import TransformersSamplers
from tests.reference_training import ReferenceTraining


class _Death:
    """Kill this process, as a power cut would, before the n-th call of a name."""

    def __init__(self, text: str | None) -> None:
        self._name, _, number = (text or "").partition(":")
        self._number, self._calls = int(number or 0), Counter()

    def __call__(self, name: str) -> None:
        self._calls[name] += 1
        if name == self._name and self._calls[name] == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


def reference_base(name: str, directory: Path, *, death: str | None = None) -> Base:
    training = ReferenceTraining(directory, before_call=_Death(death))
    sampling = TransformersSamplers(directory, max_tokens=training.max_tokens)
    return Base(name=name, directory=directory, arch="qwen3", training=training, sampling=sampling)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--die-at")
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, _, directory = given.model.partition("=")
    keys = Keys(owners={key: owner for owner, _, key in (each.partition("=") for each in given.key)})
    base = reference_base(name, Path(directory), death=given.die_at)
    service = Service({name: base}, given.root, keys=keys, limits=Limits(save_steps=4))
    listener = listen(port=given.port)
    sys.stdout.write(f"{url_of(listener)}\n")
    sys.stdout.flush()
    uvicorn.Server(server_config(make_app(service), lifespan="on")).run([listener])


if __name__ == "__main__":
    main()
