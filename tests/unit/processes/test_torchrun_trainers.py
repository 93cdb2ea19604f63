"""Test how processes of torchrun meet: by its store, and by a file that this user alone can read."""

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import ALL
from coati_rl.config.launchers import with_launcher
from coati_rl.errors import ConfigError, PeerLostError
from coati_rl.processes import torchrun_trainers
from coati_rl.processes.torchrun_trainers import TorchrunTrainers, with_torchrun
from coati_rl.torchrun import TorchrunWorld, is_one_machine, num_local, torchrun_world


@pytest.fixture(scope="module")
def store():
    """Torchrun's own, as its agent keeps it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def world_of(rank: int = 0, *, size: int = 2, local_size: int = 2, port: int = 1, restarts: int = 0) -> TorchrunWorld:
    return TorchrunWorld(rank=rank, size=size, local_size=local_size, address="127.0.0.1", port=port, restarts=restarts)


def set_world(monkeypatch, **changes: str) -> None:
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    for name, value in {"TORCHELASTIC_RUN_ID": "none", **told, **changes}.items():
        monkeypatch.setenv(name, value)


def test_a_process_of_torchrun_knows_its_place(monkeypatch) -> None:
    assert torchrun_world() is None and is_one_machine() and num_local(4) == 4
    set_world(monkeypatch, TORCHELASTIC_RESTART_COUNT="1")
    expected = TorchrunWorld(rank=3, size=4, local_size=2, address="head", port=29500, restarts=1)
    assert torchrun_world() == expected
    assert not is_one_machine() and num_local(4) == 2 and num_local(1) == 1


def test_torchrun_says_how_many_trainers_there_are() -> None:
    def config(*flags: str):
        return parse_job(["-m", "model", "-d", "rows.jsonl", *flags], ALL["sft"])[0]

    assert with_torchrun(config(), world_of(size=4)).parallel.num_trainers == 4
    assert with_torchrun(config("-t", "4"), world_of(size=4)).parallel.num_trainers == 4
    with pytest.raises(ConfigError, match="-t 3: torchrun has started 2 processes, a trainer each; use -t 2"):
        with_torchrun(config("-t", "3"), world_of())
    with pytest.raises(ConfigError, match=r"the job needs Ray .*without torchrun, with -t 2"):
        with_torchrun(config("--master_address", "head"), world_of())
    with pytest.raises(ConfigError, match="use the same number on all of them"):
        with_torchrun(config(), world_of(size=5))


def test_a_run_with_producers_is_refused_under_torchrun_and_joins_the_cluster_that_it_was_submitted_to(
    monkeypatch,
) -> None:
    config, said = parse_job(["-m", "model", "-d", "rows.jsonl"], ALL["rl"])[0], []
    assert with_launcher(config, said.append) is config
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert with_launcher(config, said.append) is config, "only a submitted job's address is taken"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert with_launcher(config, said.append).cluster.master_address == "10.0.0.1:6379"
    assert said == ["joins the Ray cluster of this job (--master_address 10.0.0.1:6379)"]
    set_world(monkeypatch)
    with pytest.raises(ConfigError, match="start it once, with -t 4 and -i for engines"):
        with_launcher(config, said.append)


def test_the_first_process_invites_the_others_by_a_file_that_it_removes(store, tmp_path, monkeypatch) -> None:
    became = []
    monkeypatch.setattr(torchrun_trainers, "_become_trainer", lambda *told: became.append(told))
    first, second = (TorchrunTrainers(world_of(rank, port=store.port)) for rank in (0, 1))
    waiting = threading.Thread(target=second.follow, args=(("module",),))
    waiting.start()
    first.invite('{"key": "secret"}', [{"A": "0"}, {"A": "1"}], tmp_path)
    waiting.join(30)
    assert became == [(1, '{"key": "secret"}', {"A": "1"}, ("module",))]
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.get("coati-rl/0/invitation").decode() == str(path), "the store has no secret"
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_the_others_end_with_a_command_that_starts_nothing(store) -> None:
    first, second = (TorchrunTrainers(world_of(rank, port=store.port, restarts=1)) for rank in (0, 1))
    first.close()
    assert second.follow(()) == 0


def test_the_second_machine_says_at_which_address_it_reaches_the_first(store, monkeypatch) -> None:
    monkeypatch.setattr(torchrun_trainers, "PREPARATION_S", 0.01)
    first, second = (TorchrunTrainers(world_of(rank, local_size=1, port=store.port, restarts=2)) for rank in (0, 1))
    with pytest.raises(PeerLostError, match=r"process 1 of torchrun: another one has ended, or told no invitation"):
        second.follow(())
    assert first.address() == "127.0.0.1"
    assert TorchrunTrainers(world_of(port=store.port)).address() == "", "one machine needs none"


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_file_that_others_may_read_or_write_is_not_trusted(store, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "invitation"
    path.write_text("{}")
    path.chmod(mode)
    store.set(f"coati-rl/{mode}/invitation", str(path))
    with pytest.raises(PeerLostError, match="other users may read it or own it"):
        TorchrunTrainers(world_of(1, port=store.port, restarts=mode)).follow(())


def test_a_disk_that_is_not_shared_is_named(store, tmp_path: Path) -> None:
    store.set("coati-rl/3/invitation", str(tmp_path / "missing"))
    with pytest.raises(PeerLostError, match="No such file or directory; all machines of torchrun need the same"):
        TorchrunTrainers(world_of(1, port=store.port, restarts=3)).follow(())


def test_a_process_becomes_the_trainer_of_its_rank(tmp_path: Path, monkeypatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(torchrun_trainers, "PROGRAM", "import os, sys; print(sys.argv[1:], input(), os.environ['A'])")
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        torchrun_trainers._become_trainer(1, "invited", {"A": "B"}, ("json",))
    os.close(writer)
    assert os.waitpid(pid, 0)[1] == 0
    with os.fdopen(reader) as output:
        assert output.read() == f"['1', '{os.getpid()}', 'json'] invited B\n"
