"""Test at which syncs the trainers score the probe in float32, too."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coati_rl.config import Config
from coati_rl.transport.manifest import TensorEntry
from coati_rl.work import ProbeReport, ProbeWork, SyncWork
from consumer.weight_sync.rank_role import publishing


def references(tmp_path: Path, *, precision: str, probes: list[tuple[int, ...]], **flags: object) -> list[bool | None]:
    """Of each sync: whether its probe was scored in float32; None if it had none. Float32 is half a nat above."""
    reported: list[bool | None] = []

    def report(probe: ProbeReport) -> None:
        reported[probe.policy_version] = probe.reference is not None
        if probe.reference is not None:
            assert (probe.reference - probe.logprobs).tolist() == [0.5, 0.5]

    backend = SimpleNamespace(
        device=torch.device("cpu"),
        precision=precision,
        layout=SimpleNamespace(sender=None, is_reporter=True),
        weight_entries=lambda: (TensorEntry(name="w", dtype="float32", shape=(1,)),),
        export_weights=lambda: iter(()),
        score=lambda micro_batches: [torch.tensor([[-1.0, -2.0]])],
        score_float32=lambda micro_batches: [torch.tensor([[-0.5, -1.5]])],
    )
    config = Config(num_inferencer=1, num_trainers=1, **flags)
    coordinator = SimpleNamespace(report_probe=report)
    with publishing(backend, config, None, coordinator, host="127.0.0.1", directory=tmp_path) as publication:
        for version, probe in enumerate(probes):
            reported.append(None)
            publication.publish(SyncWork(index=version, policy_version=version, members=(0,), probe=probe))
    return reported


def test_in_bf16_the_first_probe_and_every_eighth_are_scored_in_float32(tmp_path: Path) -> None:
    probes = [(1, 2, 3), (), *[(1, 2, 3)] * 15]
    expected = [True, None, *[False] * 7, True, *[False] * 7]
    assert references(tmp_path, precision="bf16", probes=probes) == expected


@pytest.mark.parametrize(("precision", "flags"), [("fp32", {}), ("bf16", {"max_logprob_gap": 0.1})])
def test_no_probe_is_where_no_limit_depends_on_it(tmp_path: Path, precision: str, flags: dict[str, float]) -> None:
    assert references(tmp_path, precision=precision, probes=[(1, 2, 3)] * 9, **flags) == [False] * 9


def test_where_routes_are_replayed_the_probe_is_scored_once_with_those_of_the_engine(tmp_path: Path) -> None:
    scored: list[object] = []
    reported: list[object] = []
    backend = SimpleNamespace(
        device=torch.device("cpu"),
        precision="fp32",
        layout=SimpleNamespace(sender=None, is_reporter=True),
        weight_entries=lambda: (TensorEntry(name="w", dtype="float32", shape=(1,)),),
        export_weights=lambda: iter(()),
        score=lambda micro_batches: scored.append(micro_batches[0].routes.tolist()) or [torch.tensor([[-1.0, -2.0]])],
    )
    reports = SimpleNamespace(report_probe=lambda probe: reported.append((probe.reference, probe.producer)))
    config = Config(num_inferencer=1, num_trainers=1, router_replay="rollout", backend="transformers")
    routes = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)  # of three tokens, one layer, two experts
    with publishing(backend, config, None, reports, host="127.0.0.1", directory=tmp_path) as publication:
        publication.publish(SyncWork(index=0, policy_version=0, members=(4,), probe=(1, 2, 3)))
        assert not scored
        publication.score_probe(ProbeWork(policy_version=0, producer=4, probe=(1, 2, 3), routes=routes))
    assert scored == [[[[[0, 1]], [[2, 3]], [[4, 5]]]]]
    assert reported == [(None, 4)]
