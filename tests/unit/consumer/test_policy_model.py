"""Test inputs and outputs of a policy, and which models are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from coati_rl.errors import ConfigError
from consumer.models.policy_model import load_policy, make_input, policy_forward
from tests.unit.consumer.conftest import make_micro_batch

CPU = torch.device("cpu")
FIRST, SECOND = ([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1)


def scores(model_dir: Path, *samples: tuple[list[int], int]) -> torch.Tensor:
    with torch.no_grad():
        inputs = make_input(make_micro_batch(*samples), device=CPU)
        return policy_forward(load_policy(model_dir, dtype=torch.float32), inputs)[0][0]


def test_packed_samples_do_not_see_each_other(model_dir: Path) -> None:
    packed = scores(model_dir, FIRST, SECOND)
    torch.testing.assert_close(packed[:5], scores(model_dir, FIRST), rtol=0, atol=1e-6)
    torch.testing.assert_close(packed[5:], scores(model_dir, SECOND), rtol=0, atol=1e-6)


def test_temperature_divides_logits_token_by_token(model_dir: Path) -> None:
    model = load_policy(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([FIRST[0]])).logits[0]
        temperature = np.array([[1, 1, 0.5, 2.0, 1]], dtype=np.float32)
        micro_batch = make_micro_batch(FIRST).with_arrays(temperature=temperature)
        got, _ = policy_forward(model, make_input(micro_batch, device=CPU))
    for t in (2, 3, 4):
        expected = torch.log_softmax(logits[t - 1] / temperature[0, t].item(), dim=-1)[FIRST[0][t]]
        assert got[0, t].item() == pytest.approx(expected.item(), abs=1e-5)


def test_arrays_that_may_not_be_written_are_accepted_and_absent_ones_left_out() -> None:
    micro_batch = make_micro_batch(FIRST)
    for array in (micro_batch.token_ids, micro_batch.loss_arrays["advantages"]):
        array.setflags(write=False)
    arrays = make_input(micro_batch, device=CPU, trainer_version=3).loss_arrays
    assert "old_logprobs" not in arrays
    assert arrays["trainer_version"].item() == 3
    assert arrays["token_ids"].tolist() == micro_batch.loss_arrays["token_ids"].tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_a_temperature_that_divides_nothing_is_refused(temperature: float) -> None:
    micro_batch = make_micro_batch(FIRST)
    wrong = np.where(micro_batch.loss_arrays["loss_mask"], np.float32(temperature), np.float32(1))
    with pytest.raises(ValueError, match="temperature must be positive"):
        make_input(micro_batch.with_arrays(temperature=wrong), device=CPU)


def test_a_temperature_of_zero_on_a_prompt_does_not_matter() -> None:
    micro_batch = make_micro_batch(FIRST)
    zero = micro_batch.with_arrays(temperature=micro_batch.loss_arrays["loss_mask"].astype(np.float32))
    assert make_input(zero, device=CPU).loss_arrays["temperature"].min() == 0


def test_the_model_has_no_dropout(save_model: Callable[..., Path]) -> None:
    assert not load_policy(save_model(attention_dropout=0.5), dtype=torch.float32).training


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--model {tmp_path / 'none'}: config.json cannot be read"):
        load_policy(tmp_path / "none", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_policy(tmp_path, dtype=torch.float32)


def test_code_in_a_model_directory_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    directory = tmp_path / "model"
    directory.mkdir()
    for path in model_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "custom.py").write_text(f"open({str(proof)!r}, 'w').close()")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_policy(directory, dtype=torch.float32)
    assert not proof.exists()
