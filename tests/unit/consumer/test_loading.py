"""Test that models are read without a copy of their files, and are the same whatever dtype the files have."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from coati_rl.config.optimizer import OptimizerConfig
from consumer.models.policy_model import DTYPES, Precision
from consumer.parallel.fsdp import FullyShardedParallelism
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.single_process import SingleProcess
from consumer.role_models import RoleModel
from tests.cases import one_of
from tests.unit.consumer.conftest import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def save_as(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """Save a model whose embeddings are scaled by a buffer, 5.66 for a width of 32, in a dtype."""

    def save(dtype: torch.dtype) -> Path:
        directory = tmp_path_factory.mktemp("model")
        make_model("gemma3_text").to(dtype).save_pretrained(directory)
        return directory

    return save


def load(directory: Path, precision: Precision, *, is_sharded: bool, is_trained: bool) -> RoleModel:
    parallelism: Parallelism = SingleProcess(device=CPU)
    if is_sharded:
        parallelism = FullyShardedParallelism(precision=precision, device=CPU, timeout_s=60.0)
    optimizer = OptimizerConfig() if is_trained else None
    return RoleModel("policy", directory, parallelism, precision=precision, optimizer=optimizer)


def same(found: Any, expected: Any) -> bool:
    one: Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return one.dtype == expected.dtype and torch.equal(one, expected)


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("stored", "precision", "is_sharded"),
    one_of(3, [torch.float32, torch.bfloat16, torch.float16], ["fp32", "bf16"], [False, True]),
)
def test_a_model_is_the_one_that_transformers_reads_in_the_run_s_precision(
    save_as: Callable[[torch.dtype], Path], stored: torch.dtype, precision: Precision, is_sharded: bool
) -> None:
    directory = save_as(stored)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[precision])
    for is_trained in (False, True):
        model = load(directory, precision, is_sharded=is_sharded, is_trained=is_trained)
        exported = dict(model.export(DTYPES[precision]))
        assert all(same(exported[name], weight) for name, weight in expected.named_parameters())
        buffers = dict(model.module.named_buffers())
        assert buffers
        assert all(same(buffers[name], buffer) for name, buffer in expected.named_buffers())
        if is_trained:
            masters = model.masters()
            assert all(same(masters[name], weight.float()) for name, weight in expected.named_parameters())


def test_weights_that_are_made_for_the_sake_of_buffers_take_no_memory(
    save_as: Callable[[torch.dtype], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_as(torch.bfloat16)
    made: list[str] = []
    register, from_config = torch.nn.Module.register_parameter, AutoModelForCausalLM.from_config

    def see(self: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.ndim > 1:
            made.append(parameter.device.type)
        register(self, name, parameter)

    def build(*arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "register_parameter", see)
            return from_config(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build)
    load(directory, "fp32", is_sharded=False, is_trained=False)
    assert made and set(made) == {"meta"}


def test_a_buffer_that_is_filled_in_where_it_was_made_has_its_values(
    save_as: Callable[[torch.dtype], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_as(torch.bfloat16)
    construct = Gemma3RotaryEmbedding.__init__

    def with_buffer(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        table = torch.empty(3)
        table[:] = torch.tensor([0.1, 0.2, 0.3])
        self.register_buffer("table", table, persistent=False)

    monkeypatch.setattr(Gemma3RotaryEmbedding, "__init__", with_buffer)
    module = load(directory, "fp32", is_sharded=False, is_trained=False).module
    assert same(module.model.rotary_emb.table, torch.tensor([0.1, 0.2, 0.3]))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_of_the_files_is_copied_to_read_them_nor_held_after_sharding(
    save_as: Callable[[torch.dtype], Path], monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    directory = save_as(stored)
    read: list[bool] = []
    shard = FullyShardedParallelism.shard

    def see(self: Any, module: Any, *arguments: Any) -> Any:
        in_file = [line.split("-", 1) for line in mapped_files().splitlines() if str(directory) in line]
        ranges = [range(int(first, 16), int(rest.split()[0], 16)) for first, rest in in_file]
        read.extend(any(p.data_ptr() in each for each in ranges) for p in module.parameters())
        return shard(self, module, *arguments)

    def fill(self: Any, *arguments: Any) -> None:
        held.append(str(directory) in mapped_files())
        take_rows(self, *arguments)
        held.append(str(directory) in mapped_files())

    held: list[bool] = []
    take_rows = FullyShardedParallelism._fill
    monkeypatch.setattr(FullyShardedParallelism, "shard", see)
    monkeypatch.setattr(FullyShardedParallelism, "_fill", fill)
    model = load(directory, "bf16", is_sharded=True, is_trained=True)
    assert read and all(read)
    assert held == [True, False]  # not by the optimizer either
    assert sum(
        parameter.numel() for group in model.torch_optimizer.param_groups for parameter in group["params"]
    ) == sum(weight.numel() for weight in model.masters().values())
