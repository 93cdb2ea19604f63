"""Run the train loop of a job on a dataset in a rank's process, without producers, also one that is killed."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coati_rl.batching.dataset_source import DatasetSettings, DatasetSource
from coati_rl.checkpoint.directory import STATE_FILE
from coati_rl.config.offline import OfflineConfig
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.samples import Sample
from consumer.backend import Backend
from consumer.jobs.job import JobContext
from consumer.jobs.offline import train_loop
from tests.integration.consumer.conftest import LAYOUTS

BATCH_SIZE = 64  # samples


def layout_settings(layout: str) -> dict[str, Any]:
    """Settings of a trainer; ZeRO shares out float32 masters of bfloat16 weights."""
    return {"max_grad_norm": 1.0, "precision": "bf16" if "zero" in layout else "fp32", **LAYOUTS[layout][1]}


def train(
    rank: int,
    config: OfflineConfig,
    samples: Sequence[Sample],
    backend: Backend,
    *,
    num_epochs: int,
    save_interval: int,
    out_dir: Path,
    resume_dir: Path | None,
    kill_after: int | None,
) -> int:
    """Train to the end and return the number of steps, or kill every rank with SIGKILL after a step.

    Records of steps go to records.jsonl.
    """
    resumed = None
    if resume_dir is not None:
        backend.restore(resume_dir)
        resumed = json.loads((resume_dir / STATE_FILE).read_text())["data"]
    place = backend.layout

    def report(record: dict[str, Any]) -> None:
        with (out_dir / "records.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if record["event"] == "step" and record["step"] == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    source = DatasetSource(
        samples,
        DatasetSettings(
            dp=place.dp_size,
            trainers_per_dp_rank=place.num_stages * place.tp_size,
            batch_size=BATCH_SIZE,
            micro_batch_size=16,
            num_epochs=num_epochs,
            save_interval=save_interval,
            unit=config.UNIT,
            denominator="units" if config.UNIT > 1 else "tokens",
        ),
        resumed=resumed,
        report=report,
    )
    trainer = JobContext(
        rank=rank,
        namespace="",
        run_dir=out_dir,
        checkpoint_dir=out_dir,
        timeline=NO_TIMELINE,
        on_step=lambda: None,
        objective_state={},
    )
    with train_loop(config, trainer, backend, source) as loop:
        num_steps = loop.run()
    backend.close()
    return num_steps
