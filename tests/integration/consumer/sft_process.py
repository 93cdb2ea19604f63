"""Run a trainer of supervised fine-tuning on a dataset, also one that is killed in between."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from coati_rl.checkpoint.directory import STATE_FILE
from coati_rl.config.cli import build_job
from coati_rl.config.offline_jobs import SftJobConfig
from coati_rl.data.dataset_source import DatasetSettings, DatasetSource
from coati_rl.data.forms import Conversation
from coati_rl.data.offline_samples import sft_samples
from coati_rl.observability.timeline import NO_TIMELINE
from consumer.jobs.job import Trainer
from consumer.jobs.offline import train_loop
from tests.integration.consumer.conftest import LAYOUTS
from tests.integration.consumer.parity import conversations
from tests.integration.consumer.trainer import make_trainer

NUM_STEPS, SAVE_INTERVAL, KILLED_AFTER = 40, 20, 27


def fine_tune(
    rank: int, model_dir: Path, layout: str, out_dir: Path, resume_dir: Path | None, kill_after: int | None
) -> None:
    """Train to the end, or kill every rank with SIGKILL after a step. Records of steps go to records.jsonl."""
    precision = "bf16" if "zero" in layout else "fp32"  # ZeRO shares out float32 masters of bfloat16 weights
    settings = {"max_grad_norm": 1.0, "precision": precision, **LAYOUTS[layout][1]}
    backend = make_trainer(resume_dir or model_dir, tokenizer_dir=model_dir, **settings)
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

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    source = DatasetSource(
        sft_samples(
            [Conversation(messages=tuple(each)) for each in conversations()[0]], tokenizer, max_length=256
        ).samples,
        DatasetSettings(
            dp=place.dp_size,
            trainers_per_dp_rank=place.num_stages * place.tp_size,
            batch_size=64,
            micro_batch_size=16,
            num_epochs=4,
            save_interval=SAVE_INTERVAL,
        ),
        resumed=resumed,
        report=report,
    )
    trainer = Trainer(
        rank=rank,
        namespace="",
        run_dir=out_dir,
        checkpoint_dir=out_dir,
        timeline=NO_TIMELINE,
        on_step=lambda: None,
    )
    with train_loop(build_job({"learning_rate": 1e-2}, SftJobConfig), trainer, backend, source) as loop:
        assert loop.run() == NUM_STEPS
    backend.close()
