"""Test that a path of rows that is wrong is told before libraries are imported, by each command that reads rows."""

import functools
import json

import pytest

import consumer.__main__
import rl_example
import rl_generate
from coati_rl.config.cli import build_config
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.preflight.data_files import expect_files


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dataset": "FOLDER/none.jsonl"}, "--dataset FOLDER/none.jsonl: no such file"),
        ({"dataset": "FOLDER/rows.jsonl=1,FOLDER/none.jsonl=2"}, "--dataset FOLDER/none.jsonl: no such file"),
        ({"dataset": {"a": "FOLDER/rows.jsonl", "b": "FOLDER/none.jsonl"}}, "--dataset FOLDER/none.jsonl: no such"),
        ({"dataset": "FOLDER/rows.txt"}, "--dataset FOLDER/rows.txt: unknown format '.txt'"),
        ({"eval_dataset": {"held": "FOLDER/none.jsonl"}}, "--eval-dataset FOLDER/none.jsonl: no such file"),
    ],
)
def test_a_path_without_a_file_of_a_known_format_is_refused(tmp_path, flags, message):
    def here(value):
        return json.loads(json.dumps(value).replace("FOLDER", str(tmp_path)))

    for name in ("rows.jsonl", "rows.txt"):
        (tmp_path / name).write_text("")
    config = build_config({"model": "m", "reward_type": "boxed", "dataset": here("FOLDER/rows.jsonl"), **here(flags)})
    with pytest.raises(ConfigError) as refused:
        expect_files(config)
    assert str(refused.value).startswith(here(message))


@pytest.mark.parametrize(
    "flags",
    [
        {"dataset": "FOLDER"},
        {"dataset": "FOLDER/rows.jsonl", "eval_dataset": {"held": "owner/name:test"}},
        {"dataset": "owner/name:subset:train[:5%]"},
        {"dataset": "reasoning_gym:chain_sum"},
        {"dataset": "FOLDER/none.jsonl", "streaming": True},  # told by what streams
    ],
)
def test_folders_names_of_the_hub_and_generators_are_left_to_what_reads_them(tmp_path, flags):
    (tmp_path / "rows.jsonl").write_text("")
    text = json.dumps({"model": "m", "reward_type": "boxed", **flags}).replace("FOLDER", str(tmp_path))
    assert expect_files(build_config(json.loads(text))) is None


@pytest.mark.parametrize(
    ("module", "entry", "arguments"),
    [
        (rl_example, rl_example.main, ["-rt", "boxed"]),
        (rl_generate, rl_generate.main, ["-o", "out.jsonl"]),
        (consumer.__main__, functools.partial(consumer.__main__._main, OFFLINE["sft"]), []),
    ],
)
def test_each_command_looks_before_it_goes_on(monkeypatch, capfd, tmp_path, module, entry, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_run", lambda *_, **__: pytest.fail("it goes on"))
    assert entry(["-m", "m", "-d", f"{tmp_path}/none.jsonl", *arguments], tmp_path) == 2
    assert f"--dataset {tmp_path}/none.jsonl: no such file" in capfd.readouterr().err
