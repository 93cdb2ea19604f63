"""Test that a request which vLLM cannot take is refused, whatever vLLM raises, and that its engine goes on."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coati_rl.errors import EngineError
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines.admission import RequestRefusedError
from producer.engines.options import EngineOptions
from producer.engines.vllm_engine import _VllmCore
from producer.engines.vllm_synced_adapter import SLOT, SyncedAdapter, WorkerAdapter


class Engine:
    """vLLM's engine as far as requests are added to it."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any, *, lora_request: Any) -> None:
        self.params = params
        self.lora_request = lora_request
        raise self.error

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        raise KeyError(request_ids[0])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the two classes of vLLM that a request needs; importing vLLM takes 6 s."""
    package, module = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = lambda **settings: settings
    module.StructuredOutputsParams = lambda **settings: settings
    module.RequestOutputKind = type("RequestOutputKind", (), {"FINAL_ONLY": 0, "CUMULATIVE": 1})
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("too long"), "too long"),
        (ModuleNotFoundError("No module named 'lmformatenforcer'"), "ModuleNotFoundError: No module named"),
        (RuntimeError("a grammar"), "RuntimeError: a grammar"),
    ],
)
def test_a_request_that_vllm_cannot_take_is_refused_and_nothing_of_it_stays(error: Exception, message: str) -> None:
    core = _VllmCore(EngineOptions(model="none", max_model_len=8))
    core._engine = engine = Engine(error)
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=SamplingParams())
    with pytest.raises(RequestRefusedError, match=message):
        core.add(request, None)
    with pytest.raises(RequestRefusedError, match=message):
        core.probe((1, 2), lambda _: None)
    assert core.num_running() == 0
    assert engine.aborted == ["one", "coati probe 1"]


def test_sampling_that_vllm_refuses_ends_its_request_and_not_the_engine(vllm, monkeypatch) -> None:
    def refuse(**settings: Any) -> None:
        raise ValueError(f"n must be at most 16384, got {settings['n']}")

    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", refuse)
    core = _VllmCore(EngineOptions(model="none", max_model_len=8))
    core._engine = Engine(ValueError("not reached"))
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=20000, sampling=SamplingParams())
    with pytest.raises(RequestRefusedError, match="n must be at most 16384, got 20000"):
        core.add(request, None)
    assert core.num_running() == 0


@pytest.mark.parametrize(("schema", "expected"), [(None, None), ('{"type": "object"}', {"json": '{"type": "object"}'})])
def test_a_schema_constrains_the_samples_and_without_one_nothing_does(schema, expected) -> None:
    core = _VllmCore(EngineOptions(model="none", max_model_len=8))
    core._engine = engine = Engine(ValueError("seen"))
    sampling = SamplingParams()
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=sampling, json_schema=schema)
    with pytest.raises(RequestRefusedError, match="seen"):
        core.add(request, None)
    assert engine.params["structured_outputs"] == expected


def test_every_request_and_probe_runs_with_the_adapter_that_serves_and_none_before_the_first(vllm, monkeypatch) -> None:
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda name, number, path: (name, number)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
    spec = AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",))
    core = _VllmCore(EngineOptions(model="none", max_model_len=8, adapter=spec))
    core._engine = engine = Engine(ValueError("seen"))
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=SamplingParams())
    calls = (lambda: core.add(request, None), lambda: core.probe((1, 2), lambda _: None))
    for call in calls:
        with pytest.raises(RequestRefusedError, match=r"^no adapter was received yet"):
            call()
    for version in (0, 1):
        core._adapter.commit(version)
        for call in calls:
            with pytest.raises(RequestRefusedError, match="seen"):
                call()
            assert engine.lora_request == (f"version {version}", SLOT)


def test_an_output_that_was_sampled_without_the_adapter_ends_the_engine() -> None:
    spec = AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",))
    output = SimpleNamespace(request_id="one", lora_request=None)
    with pytest.raises(EngineError, match="request one ran without the adapter"):
        _VllmCore(EngineOptions(model="none", max_model_len=8, adapter=spec))._take([output])


@pytest.mark.parametrize(("rank", "allocated"), [(1, 1), (4, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_allocates_the_next_rank_that_it_has_and_wraps_the_adapted_layers_alone(rank, allocated) -> None:
    served = SyncedAdapter(AdapterSpec(rank=rank, alpha=8.0, targets=("all-linear",)))
    names = [f"base_model.model.model.layers.{i}.{x}.lora_{f}.weight" for i in (0, 1) for x in "vu" for f in "AB"]
    arguments = served.engine_args(names)
    assert (arguments["max_lora_rank"], arguments["max_loras"]) == (allocated, 1)
    assert arguments["lora_target_modules"] == ["u", "v"]
    assert json.loads(served.to_json(names))["layers"] == [f"model.layers.{i}.{x}" for i in (0, 1) for x in "vu"]


def test_an_engine_of_whole_weights_has_no_adapters() -> None:
    served = SyncedAdapter(None)
    served.commit(0)
    assert (served.engine_args(["w"]), served.to_json(["w"]), served.request()) == ({}, "", None)
    with pytest.raises(EngineError, match="ranks up to 512"):
        SyncedAdapter(AdapterSpec(rank=513, alpha=8.0, targets=("u",))).engine_args(["u.lora_A.weight"])


def test_layers_that_vllm_would_leave_without_their_adapter_are_named(vllm, monkeypatch) -> None:
    module = ModuleType("vllm.lora.utils")
    module.parse_fine_tuned_lora_name = lambda name, mapper: (name.split(".lora_")[0].split(".", 2)[2], True)
    monkeypatch.setitem(sys.modules, "vllm.lora.utils", module)
    adapters = SimpleNamespace(modules={"l.o": 0, "l.qk": 0}, packed_modules={"l.qk": ["l.q", "l.k"]}, model=object())
    manager = SimpleNamespace(_adapter_manager=adapters)
    served = SyncedAdapter(AdapterSpec(rank=4, alpha=8.0, targets=("all-linear",)))

    def prepared(*layers: str) -> WorkerAdapter:
        return WorkerAdapter.prepared(
            served.to_json(f"base_model.model.{name}.lora_A.weight" for name in layers), manager
        )

    assert prepared("l.o", "l.q").peft["target_modules"] == ["o", "q"]
    with pytest.raises(EngineError, match=r"vLLM adds no adapter to l\.v, l\.gate of object; use --lora-sync merged"):
        prepared("l.o", "l.v", "l.k", "l.gate")
