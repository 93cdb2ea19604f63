"""Test that a request which vLLM cannot take is refused, whatever vLLM raises, and that its engine goes on."""

import sys
from types import ModuleType
from typing import Any

import pytest

from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines.admission import RequestRefusedError
from producer.engines.vllm_engine import _VllmCore


class Engine:
    """vLLM's engine as far as requests are added to it."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.params = params
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
    core = _VllmCore({"max_model_len": 8}, device="cpu")
    core._engine = engine = Engine(error)
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=SamplingParams())
    with pytest.raises(RequestRefusedError, match=message):
        core.add(request, None)
    with pytest.raises(RequestRefusedError, match=message):
        core.probe((1, 2), lambda _: None)
    assert core.num_running() == 0
    assert engine.aborted == ["one", "coati probe 1"]


@pytest.mark.parametrize(("schema", "expected"), [(None, None), ('{"type": "object"}', {"json": '{"type": "object"}'})])
def test_a_schema_constrains_the_samples_and_without_one_nothing_does(schema, expected) -> None:
    core = _VllmCore({"max_model_len": 8}, device="cpu")
    core._engine = engine = Engine(ValueError("seen"))
    sampling = SamplingParams()
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=sampling, json_schema=schema)
    with pytest.raises(RequestRefusedError, match="seen"):
        core.add(request, None)
    assert engine.params["structured_outputs"] == expected
