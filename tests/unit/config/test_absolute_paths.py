"""Test which values of a stored configuration become absolute paths."""

import pytest

from coati_rl.config.absolute_paths import with_absolute_paths


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two files and a directory."""
    for name in ("a.jsonl", "b,c.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("a.jsonl", "{}/a.jsonl"),
        ("./model", "{}/model"),
        ("b,c.jsonl", "{}/b,c.jsonl"),
        ("a.jsonl,model", "{}/a.jsonl,{}/model"),
        ("a.jsonl=0.5,model=2", "{}/a.jsonl=0.5,{}/model=2"),
        ("a.jsonl=1,owner/name:test=3", "{}/a.jsonl=1,owner/name:test=3"),
        ("reasoning_gym:chain_sum?min_terms=2=1,a.jsonl=3", "reasoning_gym:chain_sum?min_terms=2=1,{}/a.jsonl=3"),
        ("owner/name", "owner/name"),
        ("missing.jsonl", "missing.jsonl"),
        ({"math": "a.jsonl", "code": "owner/name"}, {"math": "{}/a.jsonl", "code": "owner/name"}),
    ],
)
def test_what_exists_here_is_stored_as_an_absolute_path(here, given, stored):
    def expected(text):
        return text.replace("{}", str(here))

    stored = expected(stored) if isinstance(stored, str) else {name: expected(text) for name, text in stored.items()}
    assert with_absolute_paths({"dataset": given, "seed": 1}) == {"dataset": stored, "seed": 1}
    assert with_absolute_paths({"dataset": stored}) == {"dataset": stored}, "and stays that"


def test_directories_of_outputs_too_though_they_do_not_exist_yet(here):
    values = {"save_dir": "deep/ckpt", "eval_save_dir": None, "rollout_save_dir": "/abs/rollouts"}
    assert with_absolute_paths(values) == values | {"save_dir": f"{here}/deep/ckpt"}


def test_models_and_evaluation_sets_too_and_texts_do_not(here):
    values = {"eval_dataset": {"a": "a.jsonl"}, "teacher": "model", "reference_model": None, "system_prompt": "model"}
    assert with_absolute_paths(values) == {
        "eval_dataset": {"a": f"{here}/a.jsonl"},
        "teacher": f"{here}/model",
        "reference_model": None,
        "system_prompt": "model",
    }
