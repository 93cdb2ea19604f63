"""Test supervised fine-tuning through the train loop, on a dataset and without producers.

The model learns, and a run that was killed resumes to the same weights. The gradient of cross-entropy in every layout
is tested in test_gradients.py.
"""

import json
from pathlib import Path

import pytest

from tests.integration.consumer.conftest import LAYOUTS, save_model
from tests.integration.consumer.parity import CHARACTERS, accuracy, conversations, make_tokenizer
from tests.integration.consumer.sft_process import KILLED_AFTER, NUM_STEPS, SAVE_INTERVAL, fine_tune
from tests.integration.consumer.trainer_server import TrainerServers


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parity")
    save_model(directory, tied=True, vocab_size=len(CHARACTERS) + 3, eos_token_id=2)
    make_tokenizer(directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_and_a_killed_run_goes_on_to_the_same_weights(
    trainers: TrainerServers, model_dir: Path, tmp_path: Path, layout: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    size = LAYOUTS[layout][0]
    trainers.launch_and_check(fine_tune, model_dir, layout, whole, None, None, world_size=size)
    ends = trainers.launch(fine_tune, model_dir, layout, killed, None, KILLED_AFTER, world_size=size)
    assert -9 in [ended.exit_code for ended in ends]
    resume_dir = killed / f"step-{SAVE_INTERVAL}"
    trainers.launch_and_check(fine_tune, model_dir, layout, killed, resume_dir, None, world_size=size)

    name = f"step-{NUM_STEPS}"
    files = sorted(path.name for path in (whole / name).glob("*.safetensors"))
    assert {file.split("-")[0].split(".")[0] for file in files} == {"model", "optimizer"}
    for file in files:
        assert (killed / name / file).read_bytes() == (whole / name / file).read_bytes()
    records = [json.loads(line) for line in (whole / "records.jsonl").read_text().split("\n")[:-1]]
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    assert steps[-1]["loss"] < 0.1 < 1 < steps[0]["loss"]
    tokenizer = make_tokenizer(tmp_path)
    held_out = conversations()[1]
    before, after = accuracy(model_dir, tokenizer, held_out), accuracy(whole / name, tokenizer, held_out)
    assert before < 0.1 < 0.9 < after
