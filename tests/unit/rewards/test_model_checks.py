"""Test what is refused as a reward model, before anything starts."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from rewards.model.model_checks import check_reward_model
from rewards.scorer import scorer_factory
from tests.unit.rewards.tiny_reward_model import write_reward_model


def refusal_of(directory):
    with pytest.raises(ConfigError) as caught:
        check_reward_model(directory)
    message = str(caught.value)
    assert message.startswith(f"--reward-type model:{directory}: ")
    return message


def change_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_reward_model_of_one_label_is_accepted(tmp_path):
    assert check_reward_model(write_reward_model(tmp_path)) is None


def test_what_is_no_directory_of_a_model_is_refused(tmp_path):
    assert "there is no config.json; give the directory of a model" in refusal_of(tmp_path / "none")


def test_a_model_with_several_labels_is_refused(tmp_path):
    write_reward_model(tmp_path, num_labels=3)
    assert "has 3 labels, and a reward is one number" in refusal_of(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["id2label"], settings["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "has 2 labels" in refusal_of(tmp_path), "transformers reads two where nothing is said"


def test_a_language_model_is_refused_by_the_name_of_its_class(tmp_path):
    write_reward_model(tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert "is a Qwen3ForCausalLM and no reward model" in refusal_of(tmp_path)


def test_a_model_without_a_score_head_is_refused(tmp_path):
    write_reward_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert "has no score head (score.weight), so its scores would be random" in refusal_of(tmp_path)


def test_a_model_that_lacks_a_tensor_or_holds_nan_is_refused_by_its_name(tmp_path):
    write_reward_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: each for key, each in weights.items() if key != name}, tmp_path / "model.safetensors")
    assert f"the files lack {name}" in refusal_of(tmp_path)
    save_file(weights | {name: weights[name] * float("nan")}, tmp_path / "model.safetensors")
    assert f"model.safetensors: {name} has NaN" in refusal_of(tmp_path)


def test_a_pickle_of_weights_is_refused(tmp_path):
    write_reward_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "has no model.safetensors" in refusal_of(tmp_path)


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    assert "has no chat template" in refusal_of(write_reward_model(tmp_path, template=None))


def test_a_run_refuses_it_before_anything_starts(tmp_path, small_settings):
    config = build_config({**small_settings, "reward_type": f"boxed=1,model:{tmp_path}=0.5"})
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        scorer_factory(config)


@pytest.fixture
def small_settings():
    return {"model": "m", "dataset": "d.jsonl"}
