"""Test which directory is a checkpoint, whether all of it is there, which ones go."""

import json

import pytest

from coati_rl.checkpoint.directory import (
    MANIFEST_FILE,
    STATE_FILE,
    checkpoints_in,
    find_checkpoint,
    prune,
    read_state,
    write_manifest,
)
from coati_rl.errors import ConfigError


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(step, directory="checkpoints"):
        path = tmp_path / directory / f"step-{step}"
        (path / "trainer").mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "trainer" / "rank-0.bin").write_bytes(b"optimizer")
        (path / STATE_FILE).write_text(json.dumps({"step": step}))
        write_manifest(path)
        return path

    return make


def add_to_manifest(checkpoint, name):
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"bytes": 7, "xxh3_128": "0" * 32}
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest))


def edit(checkpoint, old, new):
    manifest = checkpoint / MANIFEST_FILE
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_manifest_names_every_other_file_with_bytes_and_digest(make_checkpoint):
    path = make_checkpoint(3)
    write_manifest(path)  # again: it does not list itself
    files = json.loads((path / MANIFEST_FILE).read_text())["files"]
    assert sorted(files) == ["model.safetensors", "state.json", "trainer/rank-0.bin"]
    # xxh3-128 of b"weights"
    assert files["model.safetensors"] == {"bytes": 7, "xxh3_128": "bdbda1eb6e05adc4800d98e5524fefbc"}


def test_the_state_of_a_whole_checkpoint_is_read(make_checkpoint):
    assert read_state(make_checkpoint(3)) == {"step": 3}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "model.safetensors").write_bytes(b"weightZ"), r"model.safetensors is not what was written"),
        (lambda p: (p / "model.safetensors").write_bytes(b"weigh"), r"model.safetensors has 5 bytes instead of 7"),
        (lambda p: (p / "trainer/rank-0.bin").unlink(), r"trainer/rank-0.bin is missing"),
        (lambda p: (p / STATE_FILE).unlink(), r"state.json is missing"),
        (lambda p: (p / MANIFEST_FILE).unlink(), r"manifest.json is missing"),
        (lambda p: (p / MANIFEST_FILE).write_text("{"), r"manifest.json cannot be read"),
        (lambda p: (p / MANIFEST_FILE).write_text('{"files": {}}'), r"manifest.json does not name state.json"),
        (
            lambda p: add_to_manifest(p, "/etc/hostname"),
            r"manifest.json cannot be read: it names '/etc/hostname', which is not in the checkpoint",
        ),
        (
            lambda p: add_to_manifest(p, "/no/such/file"),
            r"manifest.json cannot be read: it names '/no/such/file', which is not in the checkpoint",
        ),
        (
            lambda p: add_to_manifest(p, "a/../../file"),
            r"manifest.json cannot be read: it names 'a/\.\./\.\./file', which is not in the checkpoint",
        ),
        (lambda p: (p / MANIFEST_FILE).write_text("[]"), r"manifest.json cannot be read"),
        (lambda p: (p / MANIFEST_FILE).write_text("{}"), r"manifest.json cannot be read: it has no 'files'"),
        (lambda p: edit(p, '"files"', '"fils"'), r"manifest.json cannot be read: it has no 'files'"),
        (lambda p: edit(p, '"bytes"', '"size"'), r"manifest.json cannot be read: it has no 'bytes'"),
        (lambda p: edit(p, '"xxh3_128"', '"xxh3"'), r"manifest.json cannot be read: it has no 'xxh3_128'"),
        (lambda p: edit(p, '"bytes": 7', '"bytes": null'), r"manifest.json cannot be read"),
        (lambda p: ((p / STATE_FILE).write_text("[]"), write_manifest(p)), r"state.json holds no object"),
        (lambda p: ((p / STATE_FILE).write_text("{"), write_manifest(p)), r"state.json is not JSON"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_remedy(make_checkpoint, damage, message):
    path = make_checkpoint(3)
    damage(path)
    with pytest.raises(ConfigError, match=rf"step-3 is no checkpoint to resume from: {message}.*give -cp a directory"):
        read_state(path)


@pytest.mark.parametrize("damages", [1, 2])
def test_a_refusal_names_the_newest_intact_checkpoint_beside_the_damaged_one(make_checkpoint, tmp_path, damages):
    paths = [make_checkpoint(step) for step in (9, 10, 100)]
    for path in paths[-damages:]:
        (path / "model.safetensors").write_bytes(b"weightZ")
    damaged = find_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=rf"model.* the newest intact one beside it is -cp {paths[2 - damages]}$"):
        read_state(damaged)


def test_a_path_means_itself_the_newest_of_its_checkpoints_or_the_newest_of_its_run(make_checkpoint, tmp_path):
    paths = [make_checkpoint(step) for step in (9, 10, 100)]
    (tmp_path / "checkpoints" / ".step-200.partial").mkdir()
    (tmp_path / "checkpoints" / "step-300x").mkdir()
    assert find_checkpoint(paths[0]) == paths[0]
    assert find_checkpoint(tmp_path / "checkpoints") == find_checkpoint(tmp_path) == paths[2]
    assert checkpoints_in(tmp_path / "checkpoints") == paths


def test_the_newest_complete_checkpoint_is_taken_and_what_is_passed_over_is_said(make_checkpoint, tmp_path, caplog):
    whole, damaged = make_checkpoint(10), make_checkpoint(20)
    (damaged / "model.safetensors").unlink()
    assert find_checkpoint(tmp_path) == whole
    assert "step-20 is passed over: model.safetensors is missing" in caplog.text


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path, name):
    with pytest.raises(
        ConfigError, match=r"--checkpoint-path .*: no checkpoint is there; give -cp a directory step-<N>"
    ):
        find_checkpoint(tmp_path / name)


def test_the_newest_checkpoints_are_kept_by_number_not_by_name(make_checkpoint, tmp_path):
    for step in (9, 10, 100):
        make_checkpoint(step)
    (tmp_path / "checkpoints" / "notes").mkdir()
    prune(tmp_path / "checkpoints", 2)
    assert names(tmp_path / "checkpoints") == ["notes", "step-10", "step-100"]
    prune(tmp_path / "checkpoints", 2)
    assert names(tmp_path / "checkpoints") == ["notes", "step-10", "step-100"]


def test_a_deletion_that_was_cut_short_is_completed_and_never_seen_as_a_checkpoint(make_checkpoint, tmp_path):
    half = make_checkpoint(1).rename(tmp_path / "checkpoints" / ".step-1.deleted")
    make_checkpoint(1), make_checkpoint(2)
    assert half not in checkpoints_in(tmp_path / "checkpoints")
    prune(tmp_path / "checkpoints", 1)
    assert names(tmp_path / "checkpoints") == ["step-2"]
