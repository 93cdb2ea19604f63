"""Test what a coordinator that replaces a lost one is told, without starting Ray."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from coati_rl.checkpoint.ledger_files import LEDGER, begin_segment, segment_of
from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.config import Config
from coati_rl.errors import PeerLostError
from coati_rl.runtime import coordinator_actor


@dataclass(frozen=True)
class Prepared:
    config: Config
    check_gpus: object = None


class FakeRay:
    """Notes the named arguments of each actor that is made."""

    def __init__(self):
        self.made = []

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "0" * 56)

    def remote(self, cls):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._make))

    def kill(self, handle):
        pass

    def _make(self, *args, **named):
        self.made.append(named)
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: None))


@pytest.mark.parametrize("segments", [(), (4, 5)])
def test_it_takes_over_from_what_this_run_has_written_and_not_from_the_run_that_it_resumes(
    monkeypatch, tmp_path, segments
):
    def write(number):
        begin_segment(segment_of(tmp_path / LEDGER, number), [Record(kind="start", fields={}).to_bytes()])

    monkeypatch.setattr(coordinator_actor, "ray", ray := FakeRay())
    monkeypatch.setattr(coordinator_actor, "wait_for", lambda *args, **named: None)
    for number in segments:
        write(number)
    prepared, paths = Prepared(Config(model={"model": "none"})), SimpleNamespace(run_dir=tmp_path)
    actor = coordinator_actor.CoordinatorActor(prepared, paths, object, None, namespace="run")
    write(6)
    for _ in range(2):
        actor._replace(PeerLostError("the coordinator died"))
    after = {"takes_over_after": max(segments, default=0)}
    assert ray.made == [{}, after, after]
