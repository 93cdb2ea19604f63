"""Define the actors of a run with the faults that a test selects; otherwise they are unchanged.

In: the environment variable COATI_FAULTS, which Ray hands on to every process of the run:
    {"exports": {"1": "NaN"}, "stagings": {"0@2": "SIGSTOP"}}
spoils the trainer's second export of weights, and sends producer 0 a signal in the middle of its transfer of version 2.
    {"signals": [{"phase": "save", "nth": 2, "victim": "coordinator", "signal": "SIGSTOP"}], "run": "/tmp/run"}
stops the coordinator when the trainers save for the second time, and notes the time beside the run directory.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from coati_rl.observability.phases import PHASES
from coati_rl.transport.group import Group
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from consumer.actor import TrainerActor
from consumer.parallel.store_location import StoreLocation
from producer.actor import ProducerActor
from producer.engines.engine_thread import ThreadedEngine

FAULTS = "COATI_FAULTS"
LAYER = "model.layers.1."
TENSOR = "model.norm.weight"  # float32[64], the last one
UNKNOWN = "model.final_norm.weight"

Entries = tuple[TensorEntry, ...]
Weights = list[tuple[str, torch.Tensor]]


def _without_a_layer(entries: Entries, weights: Weights) -> tuple[Entries, Weights]:
    return (
        tuple(entry for entry in entries if not entry.name.startswith(LAYER)),
        [(name, tensor) for name, tensor in weights if not name.startswith(LAYER)],
    )


def _renamed(entries: Entries, weights: Weights) -> tuple[Entries, Weights]:
    return (
        tuple(replace(entry, name=UNKNOWN) if entry.name == TENSOR else entry for entry in entries),
        [(UNKNOWN if name == TENSOR else name, tensor) for name, tensor in weights],
    )


def _cut(entries: Entries, weights: Weights) -> tuple[Entries, Weights]:
    return (
        tuple(replace(entry, shape=(32,)) if entry.name == TENSOR else entry for entry in entries),
        [(name, tensor[:32] if name == TENSOR else tensor) for name, tensor in weights],
    )


def _not_a_number(entries: Entries, weights: Weights) -> tuple[Entries, Weights]:
    return entries, [(name, tensor * torch.nan if name == TENSOR else tensor) for name, tensor in weights]


SPOILS: dict[str, Callable[[Entries, Weights], tuple[Entries, Weights]]] = {
    "missing layer": _without_a_layer,
    "unknown name": _renamed,
    "wrong shape": _cut,
    "NaN": _not_a_number,
    "SIGKILL": lambda entries, weights: (entries, weights),  # by `Exports`, after the first tensor
}


class Exports:
    """Stands for a backend's `export_weights`; counts its calls."""

    def __init__(self, backend, faults: dict[str, str]) -> None:
        self._backend = backend
        self._honest = backend.export_weights
        self._honest_entries = backend.weight_entries
        self._faults = faults
        self._num_made = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        fault = self._faults.get(str(self._num_made))
        self._num_made += 1
        if fault is None:
            return self._honest()
        # Both, as in a backend that is wrong about its model: the manifest is made of the entries, after this call.
        entries, weights = SPOILS[fault](self._honest_entries(), list(self._honest()))
        self._backend.weight_entries = lambda: entries
        return self._handed_out(weights, is_fatal=fault == "SIGKILL")

    def _handed_out(self, weights: Weights, *, is_fatal: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights:
            yield item
            if is_fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        self._backend.weight_entries = self._honest_entries


class Signals:
    """Sends what COATI_FAULTS asks for, when this process has reached a phase n times."""

    NAMES: ClassVar = {"engine step": "generation", "optimizer step": "step", "save": "save"}  # of phases of PHASES

    def __init__(self, actor: str) -> None:
        faults = json.loads(os.environ[FAULTS])
        self._run = Path(faults["run"])
        self._signals = faults.get("signals", [])
        self._reached: Counter[str] = Counter()
        self._pid_file(actor).write_text(str(os.getpid()))
        honest = PHASES.begin

        def begin(name: str, **options) -> int:
            number = honest(name, **options)
            if actor != "trainer-1" and name in self.NAMES:
                self.reach(self.NAMES[name])
            return number

        PHASES.begin = begin

    def reach(self, phase: str) -> None:
        """Called where the phase begins."""
        self._reached[phase] += 1
        for fault in self._signals:
            note = self._run.with_name(f"{self._run.name}.signalled-{phase}-{fault['victim']}")
            if fault["phase"] != phase or self._reached[phase] < fault["nth"] or note.exists():
                continue
            victim = self._process_of(fault["victim"])
            if victim is not None:
                note.write_text(str(time.time()))
                victim.send_signal(signal.Signals[fault["signal"]])

    def _process_of(self, victim: str) -> psutil.Process | None:
        """None if it is dead or stopped already."""
        if victim == "coordinator":
            siblings = psutil.Process().parent().children()
            return next(process for process in siblings if process.name().startswith("ray::Coord"))
        paths = [*self._run.parent.glob(f"{self._run.name}.pid-{victim}*")]
        try:
            process = psutil.Process(int(max(paths, key=lambda path: path.stat().st_mtime_ns).read_text()))
            return None if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) else process
        except psutil.NoSuchProcess:
            return None

    def _pid_file(self, actor: str) -> Path:
        return self._run.with_name(f"{self._run.name}.pid-{actor}")


class FaultyTrainer(TrainerActor):
    """Sends wrong weights, or dies while it sends."""

    def __init__(self, rank: int, *args, **options) -> None:
        super().__init__(rank, *args, **options)
        Signals(f"trainer-{rank}")

    def start(self, rendezvous: StoreLocation) -> float:
        seconds = super().start(rendezvous)
        self._backend.export_weights = Exports(self._backend, _faults("exports"))
        return seconds


class FaultyProducer(ProducerActor):
    """Dies or stops while it receives, or loses its engine."""

    def __init__(self, producer_id: int, *args, **options) -> None:
        super().__init__(producer_id, *args, **options)
        self._signals = Signals(f"producer-{producer_id}")

    def run(self, coordinator) -> None:
        honest = coordinator.lease

        def lease(*args, **options):
            reply = honest(*args, **options)
            if any(lease.prompt.purpose == "eval" for lease in reply.leases):
                self._signals.reach("evaluation")
            return reply

        coordinator.lease = lease
        super().run(coordinator)

    def commit_weights(self, *args, **options):
        self._signals.reach("commit")
        return super().commit_weights(*args, **options)

    def stage_weights(self, manifest: str, rendezvous: str, timeout_s: float) -> tuple[str, ...]:
        version = WeightManifest.from_json(manifest).policy_version
        match _faults("stagings").get(f"{self._producer_id}@{version}"):
            case None:
                _at_the_first_bucket(lambda: self._signals.reach("staging"))
            case "engine dies":
                _end_at_the_next_poll(self._loaded_engine())
            case name:
                _at_the_first_bucket(lambda: os.kill(os.getpid(), signal.Signals[name]))
        return super().stage_weights(manifest, rendezvous, timeout_s)


def _at_the_first_bucket(act: Callable[[], None]) -> None:
    honest = Group.start

    def start(*args, **kwargs) -> None:
        Group.start = honest
        act()
        honest(*args, **kwargs)

    Group.start = start


def _end_at_the_next_poll(engine: ThreadedEngine) -> None:
    def poll_staging() -> None:
        raise MemoryError("out of memory")

    engine._core.poll_staging = poll_staging  # on the engine's thread, which ends


def _faults(kind: str) -> dict[str, str]:
    return json.loads(os.environ[FAULTS]).get(kind, {})
