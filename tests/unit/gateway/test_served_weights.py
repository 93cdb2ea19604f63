"""Test what `coati-rl serve` serves: a base and adapters of it, each with its identity; what cannot be served."""

import asyncio
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from coati_rl.checkpoint.directory import write_state
from coati_rl.config.cli import parse_job
from coati_rl.config.serve import ServeConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.identity import adapter_identity, model_identity
from coati_rl.types import GenerationRequest, GenerationResult, SamplingParams
from producer.engines.vllm_served_adapters import adapter_arguments
from producer.gateway.engine_sample import EngineSample
from producer.served_weights import ServedWeights, named_models, served_weights
from tests.adapter_dirs import save_adapter


@pytest.fixture
def adapters(model_dir: Path, tmp_path: Path) -> dict[str, Path]:
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    save_adapter(tmp_path / "first", base, seed=1)
    save_adapter(tmp_path / "second", base, seed=2, r=9, target_modules=["q_proj"])
    return {"one": tmp_path / "first", "two": tmp_path / "second"}


def serve(model: Path, adapters: dict[str, Path] | None = None, *flags: str) -> ServedWeights:
    named = ",".join(f"{name}={path}" for name, path in (adapters or {}).items())
    more = ["--adapter", named] if named else []
    config, _ = parse_job(["--model", str(model), *more, *flags], ServeConfig)
    return served_weights(config, lambda name, _flag: Path(name))


def test_each_has_the_fingerprint_of_its_own_weights_and_a_name_of_its_contents(model_dir, adapters) -> None:
    models, directories = named_models(serve(model_dir, adapters))
    base = model_identity(model_dir)
    own = {name: adapter_identity(path, base) for name, path in adapters.items()}
    assert models.find("").fingerprint == models.find(model_dir.name).fingerprint == base[:16]
    assert {name: models.find(name).fingerprint for name in own} == {name: each[:16] for name, each in own.items()}
    assert directories == {f"{name}@{own[name]}": str(path) for name, path in adapters.items()}
    assert models.loras == {name: f"{name}@{each}" for name, each in own.items()}


def test_an_adapter_as_the_model_is_served_on_the_base_that_it_names(model_dir, adapters) -> None:
    weights = serve(adapters["one"], {"two": adapters["two"]})
    assert (weights.base, weights.tokenizer, [*weights.adapters]) == (model_dir, model_dir, ["first", "two"])
    models, _ = named_models(weights)
    assert models.find("").name == "first" and models.find(model_dir.name).lora is None


def test_vllm_gets_a_rank_that_it_knows_the_layers_and_on_a_cpu_an_empty_place(adapters) -> None:
    directories = {name: str(path) for name, path in adapters.items()}
    found = adapter_arguments(directories, is_cpu=False)
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert found == {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "max_lora_rank": 16,
        "lora_target_modules": layers,
    }
    assert adapter_arguments(directories, is_cpu=True)["max_loras"] == 3
    assert adapter_arguments({}, is_cpu=True) == {}


def test_the_engine_gets_the_adapter_of_the_request_s_model() -> None:
    asked: list[GenerationRequest] = []

    class Engine:
        def submit(self, request: GenerationRequest, _on_tokens: Any) -> "Future[GenerationResult]":
            asked.append(request)
            future: Future[GenerationResult] = Future()
            future.set_result(GenerationResult(request_id=request.request_id))
            return future

    engine: Any = Engine()
    sample = EngineSample(engine, SamplingParams())
    for sampling in ({"lora": "one@1"}, {}):
        asyncio.run(sample((1,), num_samples=1, sampling=sampling, on_tokens=None))
    assert [request.lora for request in asked] == ["one@1", None]


def test_what_cannot_be_served_is_refused_with_a_remedy(model_dir, make_model_dir, adapters, tmp_path) -> None:
    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            named_models(serve(*arguments))

    refused("only vllm serves adapters; use -b vllm, or merge it", model_dir, adapters, "-b", "fake")
    refused("holds a whole model; serve it as --model", model_dir, {"a": model_dir})
    refused("is the name of the base", model_dir, {model_dir.name: adapters["one"]})
    classifier = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)
    save_adapter(tmp_path / "scored", classifier, task="SEQ_CLS")
    refused("holds a scalar head, too, and engines add adapters alone; merge it", model_dir, {"a": tmp_path / "scored"})
    write_state(adapters["one"], {"weights": {"base": model_identity(model_dir)}})
    refused("is an adapter of another base", make_model_dir(3), {"a": adapters["one"]})
    config = adapters["two"] / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 9', '"r": 7'))
    refused("has shape (9, 64)", model_dir, {"a": adapters["two"]})
