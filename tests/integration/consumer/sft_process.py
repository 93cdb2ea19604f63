"""Run a trainer of supervised fine-tuning on a dataset, also one that is killed in between."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from coati_rl.config.cli import build_job
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.reading.forms import Conversation
from coati_rl.reading.offline_samples import sft_samples
from tests.integration.consumer.dataset_process import layout_settings, train
from tests.integration.consumer.parity import conversations
from tests.integration.consumer.trainer import make_trainer

NUM_STEPS, SAVE_INTERVAL, KILLED_AFTER = 40, 20, 27


def fine_tune(
    rank: int, model_dir: Path, layout: str, out_dir: Path, resume_dir: Path | None, kill_after: int | None
) -> None:
    """Train to the end, or kill every rank after a step; see `train`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    rows = [Conversation(messages=tuple(each)) for each in conversations()[0]]
    num_steps = train(
        rank,
        build_job({"learning_rate": 1e-2}, SftJobConfig),
        sft_samples(rows, tokenizer, max_length=256).samples,
        make_trainer(resume_dir or model_dir, tokenizer_dir=model_dir, **layout_settings(layout)),
        num_epochs=4,
        save_interval=SAVE_INTERVAL,
        out_dir=out_dir,
        resume_dir=resume_dir,
        kill_after=kill_after,
    )
    assert num_steps == NUM_STEPS
