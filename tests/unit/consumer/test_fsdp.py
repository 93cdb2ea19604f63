"""Test FSDP2 in one process: the same weights as plain training, and no stale copies of them.

How rows are shared out and joined is arithmetic, tried for three ranks; real ranks are in tests/integration/consumer.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MiniBatch
from coati_rl.config.optimizer import OptimizerConfig
from consumer.backend import Backend
from consumer.models.scalar_head import ScalarHead
from consumer.models.weight_history import WeightHistory
from consumer.parallel.fsdp import FullyShardedParallelism
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.sharded_rows import ShardedRows
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.cases import one_of
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_own_optimizer import OWN

SAMPLES = [([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1), ([3, 1, 4, 1, 5, 9], 3)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def make_backend(model_dir: Path, *, is_sharded: bool = True, **settings: object) -> Backend:
    config = backend_config(model_dir, **settings)
    parallelism: Parallelism = SingleProcess(device=CPU)
    if is_sharded:
        parallelism = FullyShardedParallelism(precision=config.precision, device=CPU, timeout_s=60.0)
    return Backend(config, parallelism)


def train(backend: Backend) -> None:
    micro_batches = (make_micro_batch(*SAMPLES[:2]), make_micro_batch(SAMPLES[2]))
    batch = MiniBatch(step=0, micro_batches=micro_batches, is_last=True, loss_scale=1.0, learning_rate_progress=0.0)
    backend.forward_backward(batch, PolicyLoss())
    backend.optimizer_step(loss_scale=1 / 3, learning_rate=1e-2)


def exported(backend: Backend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in backend.export_weights()}


def score(backend: Backend, model: str = "policy") -> Tensor:
    return backend.score([make_micro_batch(*SAMPLES)], model)[0]


@pytest.mark.parametrize(("precision", "tied"), one_of(2, [("fp32", True), ("fp32", False), ("bf16", False)]))
def test_without_a_peer_the_weights_are_bit_for_bit_those_of_plain_training(
    save_model: Callable[..., Path], precision: str, tied: bool
) -> None:
    """But for a tied embedding in bfloat16, whose two shares of the gradient are rounded before they are added."""
    model_dir = save_model(tie_word_embeddings=tied)
    plain, sharded = (make_backend(model_dir, is_sharded=s, precision=precision) for s in (False, True))
    for _ in range(2):
        train(plain)
        train(sharded)
    expected, found = exported(plain), exported(sharded)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    masters = sharded.policy.masters()
    assert all(torch.equal(masters[name], master) for name, master in plain.policy.masters().items())
    assert torch.equal(score(sharded), score(plain))


def test_an_optimizer_of_the_users_own_keeps_its_groups(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    optimizer = OptimizerConfig(optimizer=f"{tmp_path / 'own.py'}:momentum", learning_rate=1e-2)
    plain, sharded = (make_backend(model_dir, is_sharded=s, optimizer=optimizer) for s in (False, True))
    for backend in (plain, sharded):
        train(backend)
        train(backend)
    found = exported(sharded)
    assert all(torch.equal(found[name], weight) for name, weight in exported(plain).items())


def test_a_model_with_a_scalar_head_is_sharded_and_has_no_lm_head(model_dir: Path) -> None:
    head = ScalarHead(pad_token_id=0)
    plain, sharded = (make_backend(model_dir, is_sharded=s, scalar_head=head) for s in (False, True))
    expected, found = exported(plain), exported(sharded)
    assert list(found) == list(expected) and "score.weight" in found
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    with pytest.raises(ValueError, match="the LM head is none"), sharded.policy.head_weights():
        pass


def test_masters_are_float32_and_exports_are_what_the_forward_rounds_them_to(model_dir: Path) -> None:
    backend = make_backend(model_dir, precision="bf16")
    train(backend)
    masters = backend.policy.masters()
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    weights = exported(backend)  # on a float32 wire
    assert all(torch.equal(weights[name], master.bfloat16().float()) for name, master in masters.items())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_scores_follow_the_weights_when_a_step_or_a_kept_version_changes_them(model_dir: Path) -> None:
    """The root module stays gathered between forwards: left so, the embedding and the head would be those before."""
    backend = make_backend(model_dir, keeps_old_policy=True)
    history = WeightHistory(backend.live_weights(), max_versions=1)
    before = score(backend)
    history.keep(0)
    train(backend)
    after = score(backend)
    assert not torch.equal(after, before)
    with history.swapped_in(0):
        assert torch.equal(score(backend), before)
    assert torch.equal(score(backend), after)
    assert torch.equal(score(backend, "old"), before)
    backend.keep_old_policy()
    assert torch.equal(score(backend, "old"), after)
    tied = backend.policy.module.get_input_embeddings().weight
    assert tied is backend.policy.module.get_output_embeddings().weight


def test_a_checkpoint_names_the_models_own_class(model_dir: Path, tmp_path: Path) -> None:
    """`fully_shard` gives a model a class of its own."""
    backend = make_backend(model_dir)
    assert type(backend.policy.module).__name__ == "FSDPQwen3ForCausalLM"
    backend.save(tmp_path / "step-1", state={"step": 1})
    assert json.loads((tmp_path / "step-1" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("num_rows", [7, 6, 4, 2, 1])
def test_rows_are_shared_out_in_order_and_joined_to_what_they_were(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """As `torch.chunk` cuts, which `fully_shard` follows; the last ranks may have fewer rows, or none."""
    full = torch.arange(3.0 * num_rows).view(num_rows, 3)
    info = ParameterInfo(name="weight", shape=(num_rows, 3), stage=0)
    module = torch.nn.Module()
    ranks = [
        ShardedRows(module, [info], Layout(dp_rank=rank, dp_size=3, fsdp_size=3, fsdp_group="all"), torch.float32)
        for rank in range(3)
    ]
    parts = [rows.state_part("weight", full) for rows in ranks]
    chunks = [*full.chunk(3), *[full[:0]] * 2][:3]
    assert [part.tolist() for part in parts] == [chunk.tolist() for chunk in chunks]

    padded: list[Tensor] = []

    def all_gather_into_tensor(joined: Tensor, mine: Tensor, group: str) -> None:
        padded.append(mine)
        if len(padded) == 3:
            joined.copy_(torch.cat(padded))

    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather_into_tensor)
    *_, joined = (rows.full_state("weight", part) for rows, part in zip(ranks, parts, strict=True))
    assert torch.equal(joined, full)
