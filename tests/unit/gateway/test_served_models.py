"""Test which model of a server a request gets: by name, with the fingerprint of its weights, and an adapter's name."""

import pytest

from coati_rl.config.cli import build_job, parse_job
from coati_rl.config.serve import ServeConfig
from coati_rl.errors import ConfigError
from coati_rl.types import SamplingParams
from producer.gateway.api_error import ApiError
from producer.gateway.requests import CompletionRequest
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.served_models import ServedModel, ServedModels

BASE = ServedModel(name="base", fingerprint="00")
ONE = ServedModel(name="one", fingerprint="11", lora="one@1", parent="base")


def test_a_request_gets_the_model_that_it_names_and_the_first_one_without_a_name() -> None:
    served = ServedModels(BASE, ONE)
    assert [served.find(name) for name in ("", "base", "one")] == [BASE, BASE, ONE]
    assert ServedModels(ONE, BASE).find("") == ONE
    with pytest.raises(ApiError) as refused:
        served.find("two")
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")
    assert refused.value.message == "The model `two` does not exist; use base, one"


def test_one_model_answers_to_any_name() -> None:
    assert ServedModels(BASE).find("any") == BASE


def test_the_list_has_each_model_and_what_an_adapter_is_of() -> None:
    listed = ServedModels(BASE, ONE).listed()
    assert [(each["id"], each.get("parent")) for each in listed] == [("base", None), ("one", "base")]


@pytest.mark.parametrize(("name", "lora"), [("one", "one@1"), ("base", None), ("", None)])
def test_the_engine_gets_the_name_of_the_adapter_alone(name: str, lora: str | None) -> None:
    rules = SamplingRules(sampling=SamplingParams(), loras=ServedModels(BASE, ONE).loras)
    assert rules.changes(CompletionRequest(model=name, prompt="a")).get("lora") == lora


def test_the_default_may_be_an_adapter() -> None:
    assert ServedModels(ONE, BASE).loras == {"one": "one@1", "": "one@1"}


def test_adapters_are_given_by_name() -> None:
    config, _ = parse_job(["--model", "m", "--adapter", "a=x/y=z,b-2=w"], ServeConfig)
    assert config.server.adapters == {"a": "x/y=z", "b-2": "w"}
    assert parse_job(["--model", "m", "--adapter", "None"], ServeConfig)[0].server.adapters == {}


@pytest.mark.parametrize(
    ("value", "message"), [("x", "no NAME=PATH"), ("a=", "no NAME=PATH"), ("a=x,a=y", "a is named twice")]
)
def test_what_is_no_name_and_path_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job(["--model", "m", "--adapter", value], ServeConfig)


@pytest.mark.parametrize("value", [5, ["a=x", 5]])
def test_adapters_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="give NAME=PATH, or several with commas"):
        build_job({"adapter": value}, ServeConfig)
