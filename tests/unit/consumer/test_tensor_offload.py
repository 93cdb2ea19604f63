"""Test that tensors give their memory back and get their bits again, whatever refers to them."""

import resource
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from coati_rl.errors import RunError
from coati_rl.tensor_bytes import bytes_of
from consumer.tensor_offload import TensorOffload

CPU = torch.device("cpu")
MIB = 2**20


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_views_aliases_and_the_optimizer_s_states_are_bit_for_bit_what_they_were(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    flat = torch.randn(40)
    view, whole = flat[3:9].view(2, 3), flat.view(5, 8)
    tensors = [*model.parameters(), flat, view, whole, torch.arange(9), torch.empty(0)]
    before = [each.detach().clone() for each in tensors]
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    for _ in range(2):  # the second time over the first
        kept.offload(tensors)
        assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
        assert kept.num_bytes == sum(p.numel() * 2 for p in model.parameters()) + 40 * 4 + 9 * 8
        kept.onload()
        assert all(map(torch.equal, tensors, before))
        view.add_(1)
        before = [each.detach().clone() for each in tensors]
        assert torch.equal(flat[3:9], view.flatten()), "a view of the same memory"
    assert [*tmp_path.iterdir()] == [], "the file has no name"


def test_a_model_trains_on_as_if_nothing_had_been_parked(tmp_path: Path) -> None:
    def train(kept: TensorOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if kept is not None:
                states = [each for state in optimizer.state.values() for each in state.values()]
                kept.offload([*model.parameters(), *states])
                kept.onload()
        return [each.detach() for each in model.parameters()]

    assert all(map(torch.equal, train(None), train(TensorOffload(device=CPU, directory=tmp_path, flag="--colocate"))))


def test_the_memory_is_the_operating_system_s_again(tmp_path: Path) -> None:
    tensors = [torch.ones(MIB // 4) for _ in range(64)]  # below the size from which malloc maps memory by itself
    before = resident_bytes()
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    kept.offload(tensors)
    assert before - resident_bytes() > 56 * MIB
    kept.onload()
    assert all(bool((each == 1).all()) for each in tensors)


def test_digests_do_not_pin_the_memory(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.int32)
    assert bytes(bytes_of(tensor)) == tensor.clone().numpy().tobytes()
    assert bytes(bytes_of(torch.empty(0))) == b""
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    kept.offload([tensor])
    assert kept.num_bytes == 48
    kept.onload()
    assert tensor.tolist() == [*range(12)]
    with pytest.raises(ValueError, match="contiguous"):
        bytes_of(torch.ones(3, 4).T)


def test_a_map_of_a_file_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    mapped = torch.from_file(str(tmp_path / "file"), size=16)
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    kept.offload([mapped])
    assert kept.num_bytes == 0
    assert mapped.tolist() == [0.0] * 16
    kept.onload()


def test_what_is_parked_cannot_be_parked_again(tmp_path: Path) -> None:
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    kept.offload([torch.ones(2)])
    with pytest.raises(ValueError, match="offloaded already"):
        kept.offload([torch.ones(2)])


def test_without_room_nothing_is_given_up_and_the_directory_is_named(tmp_path: Path) -> None:
    tensor = torch.ones(MIB)
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        with pytest.raises(RunError, match=f"cannot be kept in {tmp_path} .*: File too large"):
            kept.offload([tensor])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert bool((tensor == 1).all())


@pytest.mark.full
def test_memory_that_is_gone_when_a_turn_begins_is_named(tmp_path: Path) -> None:
    tensor = torch.ones(2**26)  # 0.25 GiB
    kept = TensorOffload(device=CPU, directory=tmp_path, flag="--colocate")
    kept.offload([tensor])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**26, limits[1]))
    try:
        with pytest.raises(RunError, match=r"no memory for 0.25 GiB of a trainer's weights .*\(--colocate\): .*memory"):
            kept.onload()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    kept.onload()
    assert bool((tensor == 1).all())
