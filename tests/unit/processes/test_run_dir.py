"""Test run directories: a run never writes into another run's; a resumed one continues in its own."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.resume import ResumePoint
from coati_rl.checkpoint.resumed_run import changed_settings
from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from coati_rl.processes.run_dir import checkpoint_bytes, locked, make_run_dir
from coati_rl.run_reader.run_directory import RunDirectory


def paths_of(*argv):
    return make_run_dir(parse(argv)[0])


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_the_directory_is_named_after_the_project_and_numbered_from_the_second_run_on(tmp_path):
    names = [paths_of("-p", "math").run_dir for _ in range(3)]
    assert names == [tmp_path / "runs/math", tmp_path / "runs/math-2", tmp_path / "runs/math-3"]


def test_a_given_directory_is_numbered_too(tmp_path):
    names = [paths_of("--run-dir", "deep/here").run_dir for _ in range(2)]
    assert names == [tmp_path / "deep/here", tmp_path / "deep/here-2"]


def test_all_output_goes_below_the_run_directory(tmp_path):
    paths = paths_of()
    run_dir = tmp_path / "runs/GRPO"
    assert (paths.checkpoints, paths.evaluation) == (run_dir / "checkpoints", run_dir / "eval")
    assert (paths.rollouts, paths.logs) == (run_dir / "rollouts", run_dir / "logs")


def test_each_output_may_go_elsewhere(tmp_path):
    paths = paths_of("-sd", "model", "-esd", "eval", "-rsd", "/abs/rollouts")
    assert (paths.checkpoints, paths.evaluation) == (tmp_path / "model", tmp_path / "eval")
    assert str(paths.rollouts) == "/abs/rollouts"
    assert paths.logs == tmp_path / "runs/GRPO/logs"


def test_readers_find_outputs_elsewhere_from_any_directory(tmp_path, monkeypatch):
    paths = paths_of("-sd", "model", "-esd", "eval", "-rsd", "rollouts")
    (paths.checkpoints / "step-1").mkdir(parents=True)
    paths.rollouts.mkdir()
    (paths.rollouts / "steps-000001-000100.jsonl").touch()
    monkeypatch.chdir("/")
    run = RunDirectory(paths.run_dir)
    assert (run.checkpoints(), run.evaluation_summary.parent) == ([tmp_path / "model/step-1"], tmp_path / "eval")
    assert run.rollout_files() == [tmp_path / "rollouts/steps-000001-000100.jsonl"]


def test_the_resolved_configuration_is_written_and_can_be_read_back():
    argv = ("-t", "4", "-lr", "1e-4", "--stop", "\n\n", "-ed", '{"t": "x.jsonl"}', "-s", "", "--wandb", "-topk", "5")
    config = parse(argv)[0]
    path = make_run_dir(config).run_dir / "config.yaml"
    assert parse(["--config", str(path)])[0] == config


def test_a_stored_configuration_names_the_same_data_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").touch()
    config = parse(["-d", "data.jsonl"])[0]
    path = make_run_dir(config).run_dir / "config.yaml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    stored = parse(["--config", str(path)])[0]
    assert stored.data.dataset == str(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    assert changed_settings(stored, config, sizes=()) == [], (
        "a resume with the flags as they were typed changes nothing"
    )


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .*/file/run: cannot be created: Not a directory"):
        paths_of("--run-dir", "file/run")


def test_a_full_disk_is_named_by_the_directory_also_where_no_flag_gave_it(tmp_path, monkeypatch):
    def full(run_dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coati_rl.processes.run_dir.record_start", full)
    with pytest.raises(ConfigError, match=r"--run-dir .*/runs/\S+: cannot be created: No space left on device"):
        paths_of()


@pytest.fixture
def resumed(tmp_path):
    """(checkpoint directory, flags) -> the paths of the run that goes on from its step 20."""

    def run(checkpoint, *argv):
        checkpoint.mkdir(parents=True, exist_ok=True)
        point = ResumePoint(directory=checkpoint, position=Position(step=20), num_steps=40, changes=())
        return make_run_dir(parse(argv)[0], point)

    return run


@pytest.mark.parametrize("flags", [(), ("--run-dir", "runs/math"), ("--run-dir", "runs/math-2")])
def test_a_run_goes_on_in_its_own_directory(tmp_path, resumed, flags):
    before = [paths_of("-p", "math"), paths_of("-p", "math")][1]
    old_config = (before.run_dir / "config.yaml").read_text()
    paths = resumed(before.checkpoints / "step-20", "-lr", "1e-5", *flags)
    assert paths == before
    assert (paths.run_dir / "config-step-20.yaml").read_text() == old_config
    assert "learning_rate: 1.0e-05" in (paths.run_dir / "config.yaml").read_text()
    resumed(before.checkpoints / "step-20", *flags)
    assert "learning_rate: 1.0e-05" in (paths.run_dir / "config-step-20-2.yaml").read_text(), "none is overwritten"


@pytest.mark.parametrize(
    ("checkpoint", "flags"),
    [
        ("runs/math/checkpoints/step-20", ("--run-dir", "runs/other")),
        ("runs/math/checkpoints/step-20", ("--run-dir", "elsewhere/math")),
        ("copied/step-20", ("--run-dir", "runs/other")),
        ("copied/checkpoints/step-20", ("--run-dir", "runs/other")),
    ],
)
def test_from_anywhere_else_a_run_goes_on_in_a_new_directory(tmp_path, resumed, checkpoint, flags):
    before = paths_of("-p", "math")
    paths = resumed(tmp_path / checkpoint, *flags)
    assert paths.run_dir == tmp_path / flags[1]
    assert sorted(path.name for path in before.run_dir.iterdir() if path.suffix) == ["config.yaml", "machine.jsonl"]


def test_a_new_directory_never_continues_into_an_existing_one(tmp_path, resumed):
    paths_of("-p", "math")
    assert resumed(tmp_path / "copied/step-20", "-p", "math").run_dir == tmp_path / "runs/math-2"


@pytest.mark.parametrize("flags", [(), ("-sd", "elsewhere")])
def test_later_checkpoints_beside_the_one_resumed_from_are_set_aside(tmp_path, resumed, flags):
    directory = tmp_path / "elsewhere" if flags else paths_of().checkpoints
    for step in (10, 20, 30):
        (directory / f"step-{step}").mkdir(parents=True)
    paths = resumed(directory / "step-20", *flags)
    assert sorted(path.name for path in directory.iterdir()) == ["step-10", "step-20"]
    assert (paths.run_dir / "discarded/after-step-20/checkpoints/step-30").is_dir()


def test_checkpoints_that_another_run_goes_on_from_are_left_alone(tmp_path, resumed):
    for step in (20, 30):
        (tmp_path / "copied" / f"step-{step}").mkdir(parents=True)
    resumed(tmp_path / "copied/step-20")
    assert sorted(path.name for path in (tmp_path / "copied").iterdir()) == ["step-20", "step-30"]


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(tmp_path):
    (tmp_path / "model" / "step-100").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--save-dir model: holds checkpoints of another run, .* step-100"):
        paths_of("-sd", "model")
    assert not (tmp_path / "runs").exists()


def test_without_room_for_a_checkpoint_no_directory_is_made_and_nothing_is_moved(tmp_path, resumed):
    with pytest.raises(
        ConfigError, match=r"runs/GRPO/checkpoints: a checkpoint takes about .* or write checkpoints els"
    ):
        make_run_dir(parse([])[0], checkpoint_bytes=2**60)
    assert not (tmp_path / "runs").exists()
    directory = paths_of().checkpoints
    for step in (20, 30):
        (directory / f"step-{step}").mkdir(parents=True)
    point = ResumePoint(directory=directory / "step-20", position=Position(step=20), num_steps=40, changes=())
    with pytest.raises(ConfigError, match=r"runs/GRPO/checkpoints: a checkpoint takes about"):
        make_run_dir(parse([])[0], point, checkpoint_bytes=2**60)
    assert (directory / "step-30").is_dir()


def test_half_a_checkpoint_makes_room_for_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    partial = tmp_path / "model/.step-3.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(2**20))
    make_run_dir(parse(["-sd", "model"])[0], checkpoint_bytes=2**21)
    with pytest.raises(ConfigError, match=r"a checkpoint takes about 1.0 MiB, and 1.0 MiB are free"):
        make_run_dir(parse(["-sd", "model"])[0], checkpoint_bytes=2**21 + 1)


@pytest.mark.parametrize(("precision", "per_parameter"), [("fp32", 12), ("bf16", 14)])
def test_a_checkpoint_takes_weights_two_moments_and_masters_of_bf16(tmp_path, precision, per_parameter):
    for name, shape in {
        "model-1.safetensors": (3, 4),
        "model-2.safetensors": (5,),
        "optimizer.safetensors": (9,),
    }.items():
        save_file({"weight": np.zeros(shape, dtype=np.float16)}, tmp_path / name)
    assert checkpoint_bytes(parse(["-m", str(tmp_path)])[0], precision) == (3 * 4 + 5) * per_parameter
    with_critic = parse(["-m", str(tmp_path), "-a", "PPO"])[0]
    assert checkpoint_bytes(with_critic, precision) == 2 * (3 * 4 + 5) * per_parameter


@pytest.mark.parametrize(("targets", "sides"), [("all-linear", (6 + 4) + (4 + 8)), ("up", 4 + 8)])
def test_a_checkpoint_of_adapters_takes_their_factors_and_moments(tmp_path, targets, sides):
    tensors = {"embed.weight": (9, 4), "layers.0.mlp.up.weight": (8, 4), "layers.0.q.weight": (6, 4)}
    tensors |= {"layers.0.norm.weight": (4,), "lm_head.weight": (9, 4)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    flags = ["-m", str(tmp_path), "--lora-rank", "2", "--lora-targets", targets]
    assert checkpoint_bytes(parse(flags)[0], "fp32") == 2 * sides * 12


def test_a_directory_is_held_by_one_process_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="is still running"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
