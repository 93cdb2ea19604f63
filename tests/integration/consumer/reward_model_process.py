"""Run a trainer of a reward model on pairs of answers, also one that is killed in between."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from coati_rl.checkpoint.directory import STATE_FILE, load_state
from coati_rl.data.dataset_source import DatasetSettings, DatasetSource
from coati_rl.data.forms import Pair
from coati_rl.data.reward_samples import padding_token_id, rm_samples
from consumer.backend import Backend
from consumer.models.scalar_head import ScalarHead
from consumer.objectives.pairwise import Pairwise
from consumer.optim.learning_rate import LearningRate
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep
from tests.integration.consumer.conftest import LAYOUTS
from tests.integration.consumer.parity import Conversation, conversations
from tests.integration.consumer.trainer import make_trainer

NUM_STEPS, SAVE_INTERVAL, KILLED_AFTER = 30, 10, 17
NUM_PAIRS, BATCH_SIZE = 320, 64  # samples are twice the pairs


def as_pair(row: Conversation) -> Pair:
    """The right answer before the wrong one."""
    question, answer = row
    wrong = {"role": "assistant", "content": {"odd": "even", "even": "odd"}[answer["content"]]}
    return Pair(prompt=(question,), chosen=(answer,), rejected=(wrong,))


def make_reward_trainer(model_dir: Path, tokenizer_dir: Path, layout: str) -> Backend:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    precision = "bf16" if "zero" in layout else "fp32"  # ZeRO shares out float32 masters of bfloat16 weights
    settings = {"max_grad_norm": 1.0, "precision": precision, **LAYOUTS[layout][1]}
    head = ScalarHead(seed=0, pad_token_id=padding_token_id(tokenizer))
    return make_trainer(model_dir, tokenizer_dir=tokenizer_dir, scalar_head=head, **settings)


def train_reward_model(
    rank: int, model_dir: Path, layout: str, out_dir: Path, resume_dir: Path | None, kill_after: int | None
) -> None:
    """Train to the end, or kill every rank with SIGKILL after a step. Records of steps go to records.jsonl."""
    backend = make_reward_trainer(resume_dir or model_dir, model_dir, layout)
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
    pairs = [as_pair(row) for row in conversations()[0][:NUM_PAIRS]]
    objective = Pairwise(center_coefficient=0.01)
    source = DatasetSource(
        rm_samples(pairs, tokenizer, max_length=256).samples,
        DatasetSettings(
            dp=place.dp_size,
            trainers_per_dp_rank=place.num_stages * place.tp_size,
            batch_size=BATCH_SIZE,
            micro_batch_size=16,
            num_epochs=NUM_STEPS * BATCH_SIZE // (2 * NUM_PAIRS),
            save_interval=SAVE_INTERVAL,
            unit=objective.unit,
            denominator="units",
        ),
        resumed=resumed,
        report=report,
    )
    train_step = TrainStep(backend, objective, learning_rate=LearningRate(peak=1e-2))
    loop = TrainLoop(
        rank,
        source,
        source,
        backend,
        lambda is_corrected: train_step,
        is_reporter=place.is_reporter,
        checkpoint_dir=out_dir,
    )
    assert loop.run() == NUM_STEPS
    backend.close()


def save_again(rank: int, saved: Path, tokenizer_dir: Path, layout: str, again: Path) -> None:
    """Restore a checkpoint in a layout, and save it."""
    backend = make_reward_trainer(saved, tokenizer_dir, layout)
    backend.restore(saved)
    backend.save(again, state=load_state(saved))
    backend.close()
