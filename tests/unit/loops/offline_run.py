"""Execute a whole job on a dataset without Ray: the real actors, called directly, on plain torch in one process."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import consumer.actor
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.offline_rules import check_offline
from coati_rl.driver import coordinator_actors
from coati_rl.preflight.prepare_offline import DatasetPreparation
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.run_dir import make_run_dir
from consumer.backend import Backend
from consumer.parallel.layout_rules import check_layout
from consumer.parallel.single_process import SingleProcess
from consumer.parallel.store_location import StoreLocation
from consumer.proofs.model import try_model


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@dataclass
class OfflineTrace:
    """Record a job."""

    run_dir: Path
    plan: list[str]
    events: list[dict] = field(default_factory=list)
    models_at_start: set[str] = field(default_factory=set)
    models_at_end: set[str] = field(default_factory=set)

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]

    def files(self, step):
        """The bytes of a checkpoint's tensors."""
        directory = self.run_dir / "checkpoints" / f"step-{step}"
        return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def run_offline(job, values, *, stop_after=None):
    """Run a job to its end; `stop_after` optimizer steps it is interrupted."""
    config = build_job(values, OFFLINE[job])
    check_offline(config)
    prepared = DatasetPreparation(check_layout=check_layout, try_model=try_model, is_dry_run=False).prepare(config)
    paths = make_run_dir(prepared.config, prepared.resume)
    trace = OfflineTrace(run_dir=paths.run_dir, plan=prepared.plan.lines())
    backends = []

    def make_backend(settings, **_):
        backends.append(Backend(settings, SingleProcess(device=torch.device("cpu"))))
        return backends[0]

    class Recorded(coordinator_actors.DatasetCoordinatorActor):
        def report_step(self, step, metrics):
            super().report_step(step, metrics)
            if step + 1 == stop_after:
                self.stop()

    def context(name):
        return ActorContext(name=name, log_dir=paths.logs, device="cpu", dtype="float32", slot=0, num_slots=1)

    with pytest.MonkeyPatch.context() as patch:
        for module in (coordinator_actors, consumer.actor):
            patch.setattr(module, "enter_actor", lambda context: None)
        patch.setattr("consumer.backend.make_backend", make_backend)
        patch.setattr("consumer.parallel.process_group.init_process_group", lambda **options: torch.device("cpu"))
        coordinator = Recorded(prepared, paths, context("coordinator"))
        trainer = consumer.actor.TrainerActor(
            0,
            prepared.config,
            context("trainer-0"),
            run_dir=paths.run_dir,
            checkpoint_dir=paths.checkpoints,
            resume_dir=prepared.resume.directory if prepared.resume else None,
        )
        torch.manual_seed(0)
        trainer.start(StoreLocation(address="127.0.0.1"))
        trace.models_at_start = set(backends[0].models)
        trainer.run(coordinator, "namespace")
        trace.models_at_end = set(backends[0].models)
    trace.events = coordinator.events(0, timeout_s=0.0)
    return trace
