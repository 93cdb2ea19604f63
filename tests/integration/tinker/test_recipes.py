"""Recipes of tinker-cookbook run unmodified, with the real client and without a network, against one server."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from make_tiny_model import make_tokenizer
from tinker_recipe_data import NAME, write_data_set

from tests.cookbook_recipes import STEPS
from tests.tinker_client import KEY, server
from tests.tiny_models import make_writer

pytestmark = pytest.mark.full
REPOSITORY = Path(__file__).parents[3]
QUESTION = "What is 3 + 4?"
ASKED = f"{QUESTION} Provide a numerical answer without units, written inside \\boxed{{}}."
SHOWN = "How many r's are in strawberry? Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a"


def write_rows(out: Path) -> None:
    """Chats answer 7 or 8 by a coin, so that rewards differ; only 7 is right, and 8 is what DPO rejects."""
    rng = random.Random(0)
    chats = [
        [{"role": "user", "content": ASKED}, {"role": "assistant", "content": answer}]
        for answer in ("\\boxed{7}", "\\boxed{8}")
    ]
    pair = {
        "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: It is 7.",
        "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: It is 8.",
    }
    sets = {
        "HuggingFaceH4/no_robots": [{"prompt": ASKED, "messages": rng.choice(chats)} for _ in range(320)],
        "openai/gsm8k": [{"question": QUESTION, "answer": "3 + 4 is 7\n#### 7"}] * 64,
        "Anthropic/hh-rlhf": [pair] * 64,
    }
    for name, rows in sets.items():
        write_data_set(out, name, {"train": rows, "test": rows[:8]})


@pytest.fixture(scope="module")
def recipe_model(tmp_path_factory):
    """A tiny model with random weights, and few tokens for what is said here."""
    texts = [f"<|im_start|>user\n{ASKED}", "\\boxed{7}", "\\boxed{8}", "It is 7.", "It is 8.", SHOWN]
    return make_writer(make_tokenizer(texts, vocab_size=512), 512, tmp_path_factory)()


@pytest.fixture(scope="module")
def metrics(recipe_model, tmp_path_factory):
    """Name of a recipe -> what it has logged of each step."""
    out = tmp_path_factory.mktemp("recipes")
    write_rows(out)
    (out / NAME).parent.mkdir()
    (out / NAME).symlink_to(recipe_model)
    with server(recipe_model, out / "root", name=NAME) as process:
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hf"), "TINKER_TELEMETRY": "0", "WANDB_MODE": "disabled"}
        own = {"TINKER_BASE_URL": f"http://127.0.0.1:{process.port}", "TINKER_API_KEY": KEY}
        paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts")])}
        with (out / "log").open("w") as log:
            command = [sys.executable, "-m", "tests.cookbook_recipes"]
            given = {"env": os.environ | offline | own | paths, "cwd": out, "timeout": 280}
            code = subprocess.run(command, **given, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    assert code == 0, (out / "log").read_text()[-3000:]
    read = {name: (out / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in STEPS}
    return {name: [json.loads(line) for line in lines] for name, lines in read.items()}


def column(metrics, recipe, name):
    """Values of all steps; each step has arrived."""
    values = [row[name] for row in metrics[recipe] if name in row]
    assert len(values) == STEPS[recipe]
    return values


def test_sl_loop_fits_its_chats(metrics):
    losses = column(metrics, "sl_loop", "train_mean_nll")
    assert losses[0] > 5 and losses[-1] < 0.5  # nats a token; the coin's, of four tokens, is 0.17


def test_rl_loop_goes_on_from_its_checkpoint_and_prefers_what_is_rewarded(metrics):
    rewards = column(metrics, "rl_loop", "reward/total")
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1  # in eight trials it was 0.24 to 0.42 more


def test_dpo_with_a_loss_of_the_client_s_own_separates_its_pairs(metrics):
    losses = column(metrics, "dpo", "dpo_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.6
