"""Run a trainer of a reward model on pairs of answers, also one that is killed in between."""

import random
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from coati_rl.checkpoint.directory import load_state
from coati_rl.config.cli import build_job
from coati_rl.config.jobs.rm import RmJobConfig
from coati_rl.reading.forms import Pair
from coati_rl.reading.reward_samples import padding_token_id, rm_samples
from consumer.backend import Backend
from consumer.models.scalar_head import ScalarHead
from tests.integration.consumer.dataset_process import BATCH_SIZE, layout_settings, train
from tests.integration.consumer.trainer import make_trainer

NUM_STEPS, SAVE_INTERVAL, KILLED_AFTER = 30, 10, 17
NUM_PAIRS, NUM_HELD_OUT = 320, 128  # samples are twice the pairs


def pairs() -> tuple[list[Pair], list[Pair]]:
    """(to train on, held out): of two digits, said three times each, the larger one is preferred."""
    rng = random.Random(0)
    rows = []
    for number in range(NUM_PAIRS + NUM_HELD_OUT):
        low, high = (({"role": "assistant", "content": str(d) * 3},) for d in sorted(rng.sample(range(10), 2)))
        rows.append(Pair(prompt=({"role": "user", "content": f"say {number}"},), chosen=high, rejected=low))
    return rows[:NUM_PAIRS], rows[NUM_PAIRS:]


def make_reward_trainer(model_dir: Path, tokenizer_dir: Path, layout: str) -> Backend:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    head = ScalarHead(seed=0, pad_token_id=padding_token_id(tokenizer))
    return make_trainer(model_dir, tokenizer_dir=tokenizer_dir, scalar_head=head, **layout_settings(layout))


def train_reward_model(
    rank: int, model_dir: Path, layout: str, out_dir: Path, resume_dir: Path | None, kill_after: int | None
) -> None:
    """Train to the end, or kill every rank after a step; see `train`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    num_steps = train(
        rank,
        build_job({"learning_rate": 5e-3, "center_rewards_coefficient": 0.01}, RmJobConfig),
        rm_samples(pairs()[0], tokenizer, max_length=256).samples,
        make_reward_trainer(resume_dir or model_dir, model_dir, layout),
        num_epochs=NUM_STEPS * BATCH_SIZE // (2 * NUM_PAIRS),
        save_interval=SAVE_INTERVAL,
        out_dir=out_dir,
        resume_dir=resume_dir,
        kill_after=kill_after,
    )
    assert num_steps == NUM_STEPS


def save_again(rank: int, saved: Path, tokenizer_dir: Path, layout: str, again: Path) -> None:
    """Restore a checkpoint in a layout, and save it."""
    backend = make_reward_trainer(saved, tokenizer_dir, layout)
    backend.restore(saved)
    backend.save(again, state=load_state(saved))
    backend.close()
