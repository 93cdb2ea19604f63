"""Test the training of a reward model through the train loop: it learns, resumes after a kill, changes its layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from coati_rl.reading.reward_samples import rm_samples
from tests.integration.consumer.conftest import LAYOUTS, save_model
from tests.integration.consumer.parity import CHARACTERS, make_tokenizer
from tests.integration.consumer.reward_model_process import (
    KILLED_AFTER,
    NUM_STEPS,
    SAVE_INTERVAL,
    pairs,
    save_again,
    train_reward_model,
)
from tests.integration.consumer.trainer_server import TrainerServers

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parity")
    save_model(directory, tied=True, vocab_size=len(CHARACTERS) + 3, eos_token_id=2)
    make_tokenizer(directory)
    return directory


def order_accuracy(directory: Path, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of held-out pairs in the right order, by transformers alone, in a padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    samples = rm_samples(pairs()[1], tokenizer, max_length=256).samples
    ids = [torch.tensor([*sample.prefix_ids, *sample.token_ids[:-1]]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    with torch.no_grad():
        chosen, rejected = model(input_ids=padded).logits.view(-1, 2).unbind(dim=1)
    return (chosen > rejected).float().mean().item()


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of weights and optimizer, whatever files they are in."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_and_a_killed_run_goes_on_to_the_same_weights(
    trainers: TrainerServers, model_dir: Path, tmp_path: Path, layout: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    size = LAYOUTS[layout][0]
    trainers.launch_and_check(train_reward_model, model_dir, layout, whole, None, None, world_size=size)
    ends = trainers.launch(train_reward_model, model_dir, layout, killed, None, KILLED_AFTER, world_size=size)
    assert -9 in [ended.exit_code for ended in ends]
    resume_dir = killed / f"step-{SAVE_INTERVAL}"
    trainers.launch_and_check(train_reward_model, model_dir, layout, killed, resume_dir, None, world_size=size)

    left, right = tensors_of(whole / f"step-{NUM_STEPS}"), tensors_of(killed / f"step-{NUM_STEPS}")
    assert left.keys() == right.keys()
    assert "score.weight" in left
    assert "exp_avg/score.weight" in left
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    records = [json.loads(line) for line in (whole / "records.jsonl").read_text().split("\n")[:-1]]
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    last = [record["rewards/accuracies"] for record in steps[-5:]]
    assert steps[0]["rewards/accuracies"] < 0.8 < 0.95 < sum(last) / len(last)
    tokenizer = make_tokenizer(tmp_path)
    assert order_accuracy(whole / f"step-{NUM_STEPS}", tokenizer) > 0.9


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"), [("tp2_pp2", "fsdp2_dp2"), ("fsdp2_dp2", "pp2"), ("zero2_dp2", "tp2_zero1_dp2")]
)
def test_a_checkpoint_is_the_same_in_another_layout(
    trainers: TrainerServers, model_dir: Path, tmp_path: Path, saved_in: str, loaded_in: str
) -> None:
    size, other_size = LAYOUTS[saved_in][0], LAYOUTS[loaded_in][0]
    trainers.launch_and_check(train_reward_model, model_dir, saved_in, tmp_path, None, None, world_size=size)
    saved, again = tmp_path / f"step-{NUM_STEPS}", tmp_path / "again" / "step-1"
    trainers.launch_and_check(save_again, saved, model_dir, loaded_in, again, world_size=other_size)
    left, right = tensors_of(saved), tensors_of(again)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
