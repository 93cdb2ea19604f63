"""Test that memory which a trainer gives up between uses is free then, and that no bit of what it computes changes."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.errors import RunError
from coati_rl.model_files.adapter_files import AdapterSpec
from consumer.adapters.adapters import AdapterSource
from consumer.backend import Backend
from consumer.backend_config import BackendConfig
from consumer.parallel.single_process import SingleProcess
from consumer.tensor_offload import TensorOffload
from tests.backends import backend_config
from tests.cases import one_of
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_backend import mini_batch

ALL = frozenset({"optimizer", "reference", "teacher", "old"})
BATCH = make_micro_batch(([1, 2, 3, 4, 5], 2), ([6, 7, 8], 1))


def backend_of(config: BackendConfig) -> Backend:
    return Backend(config, SingleProcess(device=torch.device("cpu")))


def bytes_of_role(backend: Backend, role: str) -> int:
    """Memory of a model's own; maps of files have none."""
    model = backend.models[role]
    masters = [] if model.torch_optimizer is None else model.masters().values()
    storages = [each.untyped_storage() for each in (*model.memory.tensors(), *masters)]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.resizable()}.values())


def train(backend: Backend, step: int) -> None:
    backend.forward_backward(mini_batch(BATCH, step=step), PolicyLoss())
    backend.optimizer_step(loss_scale=1.0, learning_rate=1e-2)


def state_of(backend: Backend) -> dict[str, Tensor]:
    """Copies of masters and of the optimizer's states, by kind and name."""
    policy, found = backend.policy, dict[str, Tensor]()
    with policy.memory.used("optimizer"):
        for name, master in policy.masters().items():
            found[f"master {name}"] = master.detach().clone()
            found |= {f"{kind} {name}": each.clone() for kind, each in policy.torch_optimizer.state[master].items()}
    return found


def bits_of(backend: Backend) -> dict[str, Tensor]:
    """What two steps compute, with the old policy kept before each."""
    found = dict[str, Tensor]()
    for step in range(2):
        backend.keep_old_policy()
        found |= {f"{step} {role}": backend.score([BATCH], role)[0] for role in ("reference", "old")}
        train(backend, step)
        found |= {f"{step} {name}": each.clone() for name, each in backend.export_weights()}
    return found | state_of(backend)


@pytest.mark.parametrize("precision", one_of(2, ["bf16", "fp32"]))
def test_two_steps_have_the_bits_of_models_that_stay_where_they_are(
    model_dir: Path, tmp_path: Path, precision: str
) -> None:
    plain, offloaded = (
        backend_of(
            backend_config(
                model_dir,
                reference_dir=model_dir,
                keeps_old_policy=True,
                precision=precision,
                offload=offload,
                offload_dir=tmp_path,
            )
        )
        for offload in (frozenset[str](), ALL)
    )
    expected, found = bits_of(plain), bits_of(offloaded)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], each) for name, each in expected.items())
    weights = sum(each.nbytes for each in offloaded.policy.module.state_dict(keep_vars=True).values())
    weights -= offloaded.policy.module.get_output_embeddings().weight.nbytes  # which is the embedding, too
    buffers = sum(each.nbytes for each in offloaded.policy.module.buffers())
    assert bytes_of_role(offloaded, "policy") == weights + buffers
    assert bytes_of_role(offloaded, "reference") == bytes_of_role(offloaded, "old") == 0
    assert bytes_of_role(plain, "policy") > 3 * weights and bytes_of_role(plain, "old") >= weights
    assert [*tmp_path.iterdir()] == [], "files have no name"


def test_what_is_not_named_keeps_its_memory(model_dir: Path, tmp_path: Path) -> None:
    options = {"reference_dir": model_dir, "keeps_old_policy": True, "precision": "bf16", "offload_dir": tmp_path}
    backend = backend_of(backend_config(model_dir, offload=frozenset({"reference"}), **options))
    backend.score([BATCH], "reference")
    train(backend, 0)
    assert bytes_of_role(backend, "reference") == 0
    assert bytes_of_role(backend, "old") > 0
    weights = sum(each.nbytes for each in backend.policy.module.parameters())
    assert bytes_of_role(backend, "policy") > 6 * weights, "float32 masters and two moments of bfloat16 weights"


def test_the_states_of_adapters_go_and_the_reference_on_their_base_stays(model_dir: Path, tmp_path: Path) -> None:
    def adapted(offload: frozenset[str]) -> Backend:
        spec = AdapterSpec(rank=2, alpha=4.0, targets=("all-linear",))
        source = AdapterSource(spec=spec, base=str(model_dir))
        config = backend_config(model_dir, adapters=source, precision="bf16", offload=offload, offload_dir=tmp_path)
        return backend_of(config)

    plain, offloaded = adapted(frozenset()), adapted(frozenset({"optimizer"}))
    expected, found = bits_of(plain), bits_of(offloaded)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    weights = bytes_of_role(offloaded, "policy")
    states = sum(each.nbytes for name, each in state_of(plain).items())
    assert bytes_of_role(plain, "policy") == weights + states


def test_the_teachers_head_is_there_in_a_backward_and_nothing_else_of_it(
    save_model: Callable[..., Path], model_dir: Path, tmp_path: Path
) -> None:
    teacher = save_model(tie_word_embeddings=False)
    config = backend_config(model_dir, teacher_dir=teacher, precision="bf16", offload=ALL, offload_dir=tmp_path)
    backend = backend_of(config)
    with backend.models["teacher"].head_weights() as head:
        assert head is not None and bytes_of_role(backend, "teacher") == head.weight.nbytes
        assert head.weight.abs().sum() > 0
    assert bytes_of_role(backend, "teacher") == 0


def test_a_score_writes_nothing_and_an_error_in_it_gives_the_memory_up_again(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"reference_dir": model_dir, "precision": "bf16", "offload": ALL, "offload_dir": tmp_path}
    backend, offloaded = backend_of(backend_config(model_dir, **options)), list[object]()
    monkeypatch.setattr(TensorOffload, "offload", lambda *_: offloaded.append(1))
    first, second = (backend.score([BATCH], "reference")[0] for _ in range(2))
    assert torch.equal(first, second) and offloaded == []
    with pytest.raises(RuntimeError, match="nothing"), backend.models["reference"].memory.used("weights", "head"):
        assert bytes_of_role(backend, "reference") > 0
        raise RuntimeError("nothing")
    assert bytes_of_role(backend, "reference") == 0


def test_a_checkpoint_restores_what_was_offloaded(model_dir: Path, tmp_path: Path) -> None:
    def make(directory: Path) -> Backend:
        return backend_of(backend_config(directory, precision="bf16", offload=ALL, offload_dir=tmp_path))

    backend = make(model_dir)
    train(backend, 0)
    backend.save(tmp_path / "step-1", state={"step": 1})
    again = make(tmp_path / "step-1")
    again.restore(tmp_path / "step-1")
    assert bytes_of_role(again, "policy") == bytes_of_role(backend, "policy")
    for each in (backend, again):
        train(each, 1)
    expected, found = state_of(backend), state_of(again)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_model_that_is_freed_leaves_no_file(model_dir: Path, tmp_path: Path) -> None:
    options = {"reference_dir": model_dir, "precision": "bf16", "offload": ALL, "offload_dir": tmp_path}
    backend = backend_of(backend_config(model_dir, **options))

    def num_open() -> int:
        opened = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sum(str(path).startswith(str(tmp_path)) for path in opened)

    before = num_open()
    backend.free("reference")
    gc.collect()
    assert num_open() < before


def test_without_room_the_flag_and_the_directory_are_named(model_dir: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(RunError, match=f"cannot be kept in {missing} while they are not used .--offload.: No such"):
        backend_of(backend_config(model_dir, precision="bf16", offload=ALL, offload_dir=missing))


def test_a_model_that_takes_weights_has_memory_to_give_up(model_dir: Path, tmp_path: Path) -> None:
    """In the files' dtype a frozen model is a map of the files, which costs none, until it takes other weights."""
    config = backend_config(
        model_dir, reference_dir=model_dir, keeps_old_policy=True, offload=ALL, offload_dir=tmp_path
    )
    backend = backend_of(config)
    storages = {
        role: [each.untyped_storage() for each in backend.models[role].parameters.local.values()]
        for role in ("reference", "old")
    }
    assert all(each.nbytes() and not each.resizable() for each in storages["reference"])
    assert all(each.nbytes() == 0 for each in storages["old"])
