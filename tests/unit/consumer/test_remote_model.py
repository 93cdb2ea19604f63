"""Test that a model which scores elsewhere gives the bits of one that a trainer holds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.config.cli import build_config
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.processes.actor_process import ActorContext
from consumer import scorer
from consumer.backend import Backend
from consumer.parallel.layout import Layout
from consumer.parallel.single_process import SingleProcess
from consumer.remote_model import RemoteModel
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_backend import mini_batch

BATCHES = [make_micro_batch(([1, 2, 3, 4, 5 + n], 2), ([6, 7, 8], 1)) for n in range(5)]
CPU = torch.device("cpu")


class Here:
    """Scorers of this process; notes how many micro-batches each has got."""

    def __init__(self, *actors: Any) -> None:
        self.actors, self.asked = actors, list[tuple[int, int]]()

    @property
    def count(self) -> int:
        return len(self.actors)

    def score(self, requests: Any, role: str, output: Any) -> list[list[np.ndarray]]:
        self.asked += [(number, len(part)) for number, part in requests]
        return [self.actors[number].score(role, part, output) for number, part in requests]

    def head_weights(self, role: str) -> Any:
        return self.actors[0].head_weights(role)


@pytest.fixture
def scorers(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr(scorer, "enter_actor", lambda context: None)
    flags = {"model": str(model_dir), "dataset": "d", "kl_coeff": 0.1, "teacher": str(model_dir), "ref_devices": 2}
    context = ActorContext(name="scorer-0", log_dir=tmp_path, device="cpu", dtype="bfloat16", slot=0, num_slots=1)
    actors = [scorer.ScorerActor(build_config(flags), context) for _ in range(2)]
    for each in actors:
        each.start()
    return Here(*actors)


def backend_of(model_dir: Path, **models: Path) -> Backend:
    return Backend(backend_config(model_dir, precision="bf16", **models), SingleProcess(device=CPU))


def test_scores_and_a_step_of_distillation_have_the_bits_of_models_on_the_trainer(
    model_dir: Path, scorers: Here
) -> None:
    local, remote = backend_of(model_dir, reference_dir=model_dir, teacher_dir=model_dir), backend_of(model_dir)
    remote.score_elsewhere({"reference", "teacher"}, scorers)
    loss = DistilledLoss(loss=PolicyLoss(), direction="reverse", kl_coeff=0.5)
    for role in ("reference", "teacher"):
        found = [backend.score(BATCHES, role) for backend in (local, remote)]
        assert all(map(torch.equal, *found)) and len(found[1]) == len(BATCHES)
    for backend in (local, remote):
        hidden = backend.score(BATCHES, "teacher", "hidden")
        pairs = zip(BATCHES, hidden, strict=True)
        batches = [each.with_arrays(teacher_hidden=h.numpy()) for each, h in pairs]
        backend.forward_backward(mini_batch(*batches), loss)
        backend.optimizer_step(loss_scale=1.0, learning_rate=1e-2)
    left, right = (backend.policy.masters() for backend in (local, remote))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_micro_batches_go_to_the_scorers_in_turns_from_that_of_the_copys_number(scorers: Here) -> None:
    for dp_rank, expected in ((0, [(0, 3), (1, 2)]), (1, [(1, 3), (0, 2)]), (2, [(0, 3), (1, 2)])):
        layout = Layout(dp_rank=dp_rank, dp_size=3)
        model = RemoteModel("reference", scorers, layout, device=CPU, dtype=torch.bfloat16)
        scorers.asked.clear()
        assert len(model.score(BATCHES, "scores")) == 5
        assert scorers.asked == expected
    assert model.score([], "scores") == []


def test_a_stage_without_the_head_asks_nothing() -> None:
    layout: Any = SimpleNamespace(is_last_stage=False)
    scorers: Any = None
    model = RemoteModel("teacher", scorers, layout, device=CPU, dtype=torch.float32)
    assert model.score(BATCHES, "scores") == []
    with model.head_weights() as head:
        assert head is None
