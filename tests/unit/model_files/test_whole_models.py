"""Test that a whole model directory is taken for all uses, and that a dry run plans without weights."""

import shutil

import pytest
from transformers import AutoModelForTokenClassification

from coati_rl.errors import ConfigError
from coati_rl.model_files.check import check_model_files
from coati_rl.preflight.resources import checked_model_config

WHOLE = "model.safetensors"


@pytest.mark.parametrize(
    "uses", [("trained",), ("trained", "sampled"), ("sampled",), ("scored",), ("trained", "rated"), ("valued",)]
)
def test_a_whole_model_is_taken_for_all_uses(model_dir, uses) -> None:
    facts = check_model_files(model_dir, *uses)
    assert (facts.has_own_head, facts.warnings) == (False, ())


def test_a_classifier_of_tokens_values_tokens_and_is_no_reward_model(model_dir, tmp_path) -> None:
    AutoModelForTokenClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(tmp_path)
    check_model_files(tmp_path, "trained", "valued")
    with pytest.raises(ConfigError, match="is a classifier of tokens, and a reward model is one of sequences"):
        check_model_files(tmp_path, "trained", "rated")


def test_a_dry_run_plans_for_a_model_whose_weights_are_not_there_yet(model_dir, tmp_path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    (directory / WHOLE).unlink()
    config, warnings = checked_model_config(directory, "trained", is_dry_run=True)
    assert config.num_hidden_layers == 1
    assert warnings == [f"--model {directory} has no weights yet: they are not checked"]
    (directory / WHOLE).touch()
    with pytest.raises(ConfigError, match=f"{WHOLE} is cut off"):
        checked_model_config(directory, "trained", is_dry_run=True)
