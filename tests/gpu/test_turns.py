"""Test that trainers give a GPU's memory up and get the same bits back, and that engines are put to sleep in order."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from consumer.tensor_offload import TensorOffload
from producer.engines.options import EngineOptions
from producer.engines.vllm_engine_args import engine_args
from producer.engines.vllm_sleep import WorkerSleep


@pytest.mark.gpu
def test_a_gpu_s_memory_is_free_while_tensors_are_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    flat = torch.randn(64 * 2**18, device=device)
    tensors = [flat, flat[8:24].view(4, 4), torch.arange(2**20, device=device)]
    before = [each.clone().cpu() for each in tensors]
    used = torch.cuda.memory_allocated(device)
    kept = TensorOffload(device=device, directory=tmp_path, flag="--colocate")
    calls = list[tuple[str, bool]]()  # and whether the storage has memory at the call

    def note(name: str) -> None:
        call = getattr(torch.cuda, name)

        def noted() -> None:
            calls.append((name, flat.untyped_storage().nbytes() > 0))
            call()

        monkeypatch.setattr(torch.cuda, name, noted)

    note("synchronize")
    note("empty_cache")
    for _ in range(2):
        calls.clear()
        kept.offload(tensors)
        assert calls[0] == ("synchronize", True), "memory is freed when copies have ended"
        assert calls[-1] == ("empty_cache", False), "what is freed is the engine's"
        assert all(copy.is_pinned() for copy in kept._keeper._kept)
        assert torch.cuda.memory_allocated(device) <= used - kept.num_bytes
        kept.onload()
        assert all(torch.equal(each.cpu(), right) for each, right in zip(tensors, before, strict=True))
    tensors[1].zero_()
    assert not flat[8:24].any(), "a view of the same memory"


@pytest.mark.parametrize(("keeps_weights", "level"), [(False, 2), (True, 1)])
def test_on_a_gpu_an_engine_sleeps_as_vllm_does_and_has_its_cache_after_its_weights(
    keeps_weights: bool, level: int
) -> None:
    called: list[object] = []
    worker = SimpleNamespace(
        device=torch.device("cuda", 0),
        sleep=lambda level: called.append(("sleep", level)),
        wake_up=lambda tags: called.append(("wake up", *tags)),
    )
    turns = WorkerSleep(worker, keeps_weights=keeps_weights)
    turns.wake_cache()
    turns.sleep()
    turns.wake()
    turns.wake_cache()
    turns.wake_cache()
    assert called == [("sleep", level), ("wake up", "weights"), ("wake up", "kv_cache")]


def test_vllm_s_sleep_mode_is_on_where_devices_are_shared_alone() -> None:
    for takes_turns in (False, True):
        options = EngineOptions(model="m", max_model_len=8, device="cuda", takes_turns=takes_turns)
        assert engine_args(options)["enable_sleep_mode"] is takes_turns
    assert "enable_sleep_mode" not in engine_args(EngineOptions(model="m", max_model_len=8, takes_turns=True))
