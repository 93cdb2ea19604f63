"""Test the file backend: files on the disk during an update, and files that do not belong to it."""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from coati_rl.errors import TransferError
from coati_rl.transport import files
from coati_rl.transport.files import FileTransport, new_group_directory
from coati_rl.transport.group import Group
from coati_rl.transport.manifest import build_manifest
from tests.unit.transport.peer import big_weights
from tests.unit.transport.receivers import Receivers
from tests.unit.transport.test_wire import weights

WITHOUT_GLOO = """
import sys
import torch._C._distributed_c10d as c10d
sys.modules["coati_rl.transport.gloo"] = None
del c10d.ProcessGroupGloo, c10d.TCPStore
try:
    import coati_rl.transport.gloo
except ImportError:
    pass
else:
    raise SystemExit("gloo is still there")
"""
with_files = pytest.mark.parametrize("backend", ["file"])


@with_files
def test_the_files_are_safetensors_with_the_tensors_real_names(sender, directory, monkeypatch):
    finish, seen = Group.finish, {}

    def look(group: Group, index: int, **settings: object) -> None:
        finish(group, index, **settings)
        if group.rank == 0:
            for path in directory.glob("*/*.safetensors"):
                seen.update(load_file(path))

    monkeypatch.setattr(Group, "finish", look)
    manifest = build_manifest(weights(), policy_version=1, bucket_bytes=2048)  # no tensor is larger
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    sender.send(manifest, weights(), timeout_s=20.0)
    future.result(timeout=60.0)
    assert seen.keys() == dict(weights()).keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in weights())


@pytest.mark.full
def test_two_processes_that_have_no_gloo_send_and_receive_updates(spawn_peer, directory):
    sending = spawn_peer("send", "file", str(directory), "60", before=WITHOUT_GLOO)
    invitation, manifest = sending.stdout.readline().strip(), sending.stdout.readline().strip()
    receiving = spawn_peer("receive", invitation, manifest, "60", before=WITHOUT_GLOO)
    raw = b"".join(tensor.numpy().tobytes() for _, tensor in big_weights())
    for _ in range(2):
        assert sending.stdout.readline() == "sending\n"
        assert receiving.stdout.readline().strip() == xxhash.xxh3_128(raw).hexdigest()
        sending.stdin.write("\n")
        sending.stdin.flush()
    assert sending.wait(timeout=60.0) == 0


@with_files
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"embed": torch.zeros(7, 33)}, r"holds 'embed' as torch\.float32\[7, 33\]"),
        ({"embed": torch.zeros(33, 7).half()}, r"holds 'embed' as torch\.float16"),
        ({"other": torch.zeros(33, 7)}, "does not hold the announced tensors"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_not_what_was_announced_is_refused(sender, directory, monkeypatch, content, message):
    tensors = weights()[:1]
    manifest = build_manifest(tensors, policy_version=1)

    def write_something_else(tensors: dict[str, torch.Tensor], path: Path, metadata: object) -> None:
        if content is None:
            path.write_bytes(b"\xff" * 100)
        else:
            save_file(content, path)

    monkeypatch.setattr(files, "save_file", write_something_else)
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    with pytest.raises(TransferError, match=f"rank 1 gave up: .*{message}"):
        sender.send(manifest, tensors, timeout_s=20.0)
    with pytest.raises(TransferError, match=message):
        future.result(timeout=60.0)


def test_a_new_group_removes_what_dead_ones_left_and_nothing_else(directory):
    dead = new_group_directory(directory)
    dead.mkdir(parents=True)
    (dead / "update-1-bucket-1.safetensors").write_bytes(b"")
    mine = directory / "notes"
    mine.mkdir()
    assert new_group_directory(directory) != dead
    assert [path.name for path in directory.iterdir()] == ["notes"]
    mine.rmdir()


def test_a_directory_that_is_not_a_groups_is_refused_since_it_would_be_removed(tmp_path):
    with pytest.raises(TransferError, match="not the name of a group's directory"):
        FileTransport(tmp_path, rank=1)


@with_files
def test_a_directory_that_cannot_be_made_is_named(sender, directory):
    directory.parent.joinpath("weights").write_text("in the way")
    tensors = weights()[:1]
    manifest = build_manifest(tensors, policy_version=1)
    with pytest.raises(NotADirectoryError):
        sender.open([1])
    directory.unlink()
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    directory.write_text("in the way")
    with pytest.raises(TransferError, match="cannot create the directory"):
        sender.send(manifest, tensors, timeout_s=20.0)
    with pytest.raises(TransferError, match="cannot create the directory"):
        future.result(timeout=60.0)
    directory.unlink()
