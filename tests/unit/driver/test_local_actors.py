"""Test trainers that are processes of this machine: their work, their ends, and those that are started early."""

import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import psutil
import pytest

from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.driver.local_actors import LocalActors
from coati_rl.errors import CoatiError, ConfigError, PeerLostError, RunError
from coati_rl.processes import trainer_process
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.trainer_process import early_trainers
from coati_rl.work import FinishWork, SaveWork
from tests.unit.driver.local_trainers import Trainer


class Coordinator:
    """Three items of work for everyone."""

    def __init__(self) -> None:
        self.reports = []

    def next_work(self, index, *, rank, timeout_s):
        assert rank in (0, 1) and timeout_s == 5.0
        return FinishWork(step=2) if index == 2 else SaveWork(step=index, data_state={})

    def report_step(self, step, metrics):
        self.reports.append((step, metrics))

    report_saved = report_evaluation = report_reference = report_step


def make_config(num_trainers=2, **fields):
    return build_job(
        {"model": "m", "dataset": "d", "device": "cpu", "num_trainers": num_trainers, **fields}, OFFLINE["sft"]
    )


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """(what happens, config, trainers that were started early) -> actors, which are ended after the test."""
    monkeypatch.setattr("coati_rl.driver.local_actors.checkpoint_bytes", lambda config, precision: 1)

    @contextmanager
    def actors(way, config, early=()):
        classes = ActorClasses(
            coordinator=Coordinator,
            make_coordinator=lambda prepared, paths: Coordinator(),
            trainer=Trainer,
            early_trainers=early,
        )
        plan = SimpleNamespace(device="cpu", precision="fp32")
        prepared = SimpleNamespace(config=config, plan=plan, resume=None)
        paths = SimpleNamespace(run_dir=tmp_path / way, logs=tmp_path / "logs", checkpoints=tmp_path / "checkpoints")
        local = LocalActors(prepared, paths, classes, scratch=tmp_path)
        try:
            yield local
        finally:
            local.end()

    with ExitStack() as ended:
        yield lambda *arguments: ended.enter_context(actors(*arguments))


def ended(actors, rank, *, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not actors.trainers[rank].is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return actors.trainers[rank].result()


@pytest.mark.full
def test_trainers_work_report_and_return(run_of, tmp_path):
    actors = run_of("run", make_config())
    actors.start()
    assert [ended(actors, rank) for rank in (0, 1)] == [2, 2]
    reports = sorted(actors.coordinator.reports, key=lambda report: report[1]["rank"])
    assert [(step, metrics["rank"]) for step, metrics in reports] == [(2, 0), (2, 1)]
    pids = {metrics["pid"] for _, metrics in reports}
    assert pids == {trainer.spawned.process.pid for trainer in actors.members()} and len(pids) == 2
    assert "threads" in (tmp_path / "logs" / "trainer-1.log").read_text()
    assert actors.heartbeats.trainers_problem(["trainer-0", "trainer-1"]) is None


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        ("refused", ConfigError, "--model m: has no head"),
        pytest.param(
            "exits", PeerLostError, r"trainer-\d died: exit code 7: no room for the model", marks=pytest.mark.full
        ),
        pytest.param("fails", RunError, r"^trainer-\d failed: ValueError: a shape is wrong$", marks=pytest.mark.full),
        pytest.param("killed", PeerLostError, r"trainer-1 died: killed by SIGKILL", marks=pytest.mark.full),
    ],
)
def test_an_end_has_its_cause_and_its_name(run_of, way, kind: type[CoatiError], message):
    actors = run_of(way, make_config(1 if way == "refused" else 2))
    with pytest.raises(kind, match=message):
        actors.start()
        ended(actors, 1)


@pytest.mark.full
def test_heartbeats_come_with_phases_and_the_end_leaves_no_process(run_of):
    actors = run_of("sleeps", make_config(1))
    actors.start()
    handles = {"trainer-0": actors.trainers[0]}
    deadline = time.monotonic() + 60
    while "trainer-0" not in actors.heartbeats.describe_phases():
        actors.heartbeats.poll(handles)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = actors.trainers[0].spawned.process.pid
    assert psutil.pid_exists(pid)
    actors.end()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("is_right", [True, False])
def test_an_early_process_is_used_if_its_variables_turn_out_right(run_of, tmp_path, monkeypatch, is_right):
    config = make_config(1)
    own = Trainer.environment if is_right else (lambda config, device: {})
    with early_trainers(config, own, tmp_path, modules=["json"]) as early:
        (first,) = early
        monkeypatch.setenv("COATI_SET_BY_A_LIBRARY", "1")  # in the driver, meanwhile
        actors = run_of("run", config, early)
        actors.start()
        assert ended(actors, 0) == 2
        assert (actors.trainers[0].spawned is first) == is_right
    assert first.process.poll() is not None


@pytest.mark.parametrize("fields", [{"master_address": "10.0.0.9"}, {"device": "cuda"}, {"device": "auto"}])
def test_none_is_started_early_where_ray_or_a_gpu_may_be_needed(tmp_path, monkeypatch, fields):
    monkeypatch.setattr(trainer_process, "_GPU_DRIVER", tmp_path)  # it is there
    with early_trainers(make_config(**fields), Trainer.environment, tmp_path, modules=[]) as early:
        assert early == []


def test_on_a_machine_without_gpus_one_is_started_early(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_process, "_GPU_DRIVER", tmp_path / "missing")
    with early_trainers(make_config(1, device="auto"), Trainer.environment, tmp_path, modules=[]) as early:
        assert len(early) == 1
    assert early[0].process.poll() is not None
