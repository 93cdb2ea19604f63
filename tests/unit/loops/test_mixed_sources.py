"""Test runs on several sources with shares: what they draw, and that a resumed run goes on in its place."""

import shutil

import pytest

from coati_rl.errors import ConfigError
from tests.unit.loops.offline_run import run_offline, write_rows

CHATML = "<|im_start|>"


def rows(name, number):
    return [{"prompt": f"{name}{i}", "completion": name} for i in range(number)]


def test_fine_tuning_on_mixed_sources_goes_on_bit_for_bit_and_its_checkpoints_have_the_chat_template(
    model_dir, tmp_path
):
    from transformers import AutoTokenizer

    few, many = write_rows(tmp_path / "few.jsonl", rows("a", 3)), write_rows(tmp_path / "many.jsonl", rows("b", 9))
    values = {
        "model": str(model_dir),
        "dataset": f"{few}=1,{many}=3",
        "chat_template": "chatml",
        "device": "cpu",
        "train_batch_size": 4,
        "max_epochs": 2,
        "save_interval": 2,
        "learning_rate": 1e-2,
        "run_dir": str(tmp_path / "whole"),
    }
    whole = run_offline("sft", values)
    assert [record["step"] for record in whole.of("step")] == [1, 2, 3, 4, 5, 6]
    saved = AutoTokenizer.from_pretrained(whole.run_dir / "checkpoints" / "step-6")
    assert saved.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith(CHATML)

    run_dir = tmp_path / "resumed"
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-6")
    again = values | {"run_dir": str(run_dir), "checkpoint_path": str(run_dir)}
    resumed = run_offline("sft", again)
    assert resumed.files(6) == whole.files(6) and whole.files(6)
    shutil.rmtree(run_dir / "checkpoints" / "step-6")
    with pytest.raises(ConfigError, match=r"were mixed by shares \(3 rows: 1/4, 9 rows: 3/4\), so that its position"):
        run_offline("sft", again | {"dataset": f"{few}=1,{many}=1"})


@pytest.mark.full
def test_a_policys_prompts_are_drawn_by_shares_and_a_resumed_run_draws_the_same(
    run_in_threads, write_prompts, tmp_path
):
    few, many = write_prompts("few", 2), write_prompts("many", 6)
    fields = {"dataset": f"{few}=1,{many}=1", "save_interval": 1, "inference_batch_size": 2}
    whole = run_in_threads(fields)
    drawn = sorted(whole.responses)
    assert [sum(uid.startswith("train:1-") is is_second for uid in drawn) for is_second in (False, True)] == [4, 4]
    assert [uid for uid in drawn if uid.startswith("train-")] == ["train-0.0", "train-0.1", "train-1.0", "train-1.1"]

    run_dir = tmp_path / "resumed"
    shutil.copytree(whole.paths.run_dir, run_dir)
    again = fields | {"run_dir": str(run_dir), "checkpoint_path": str(run_dir / "checkpoints" / "step-2")}
    resumed = run_in_threads(again)
    assert resumed.responses == {uid: whole.responses[uid] for uid in resumed.responses} and resumed.responses
    assert [record["loss"] for record in resumed.steps] == [record["loss"] for record in whole.steps[2:]]
    with pytest.raises(ConfigError, match="not the prompts of --checkpoint-path"):
        run_in_threads(again | {"dataset": f"{few}=1,{many}=3"})
