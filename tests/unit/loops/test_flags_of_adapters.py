"""Test the flags of adapters that act after a run."""

from types import SimpleNamespace

import pytest

from coati_rl.checkpoint.directory import write_manifest, write_state
from coati_rl.errors import RunError
from coati_rl.model_files.identity import model_identity
from coati_rl.processes.run_dir import RunPaths
from consumer.merge_command import export_run, merge
from tests.adapter_dirs import save_adapter


def test_export__merged_writes_the_model_of_the_last_checkpoint_and_none_nothing(make_model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    model = make_model_dir(0)
    names = ("run_dir", "checkpoints", "evaluation", "rollouts", "logs")
    paths = RunPaths(**{name: tmp_path / "run" / name for name in names} | {"run_dir": tmp_path / "run"})
    config = SimpleNamespace(lora=SimpleNamespace(export="merged"), model=SimpleNamespace(model=str(model)))
    with pytest.raises(RunError, match="--export merged: the checkpoints are whole, and the export failed"):
        export_run(config, paths)
    for step in (1, 2):
        save_adapter(paths.checkpoints / f"step-{step}", AutoModelForCausalLM.from_pretrained(model), seed=step)
        write_state(paths.checkpoints / f"step-{step}", {})
        write_manifest(paths.checkpoints / f"step-{step}")
        assert f"weights {model_identity(model)[:16]}" not in export_run(config, paths)[0]
    merge(str(model), str(paths.checkpoints / "step-2"), tmp_path / "right")
    assert model_identity(paths.run_dir / "export") == model_identity(tmp_path / "right")
    config.lora.export = "none"
    assert export_run(config, paths) == []
