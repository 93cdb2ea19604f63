"""Samples that vLLM constrains to a schema, of a model that prefers anything else."""

import json
from dataclasses import replace

import pytest

from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, Harness, request

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.full
def test_samples_follow_their_schema_beside_others_that_have_none_and_a_wrong_schema_is_refused(checkpoints) -> None:
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16}
    with hosted_engine("vllm", model=str(checkpoints["tied"][0]), **settings) as engine:
        harness = Harness(engine, checkpoints["tied"])
        plain = request("plain", range(40, 60), num_samples=4, seed=1)
        alone = harness.generate(plain)["plain"]
        one = request("one", range(40, 60), num_samples=4, seed=1, max_new_tokens=200)
        wrong = replace(one, request_id="wrong", json_schema='{"type": "nonsense"}')
        again = replace(plain, request_id="again")
        found = harness.generate(replace(one, json_schema=json.dumps(SCHEMA)), wrong, again)
    assert not any(each.text.startswith("{") for each in alone.completions)
    for each in found["one"].completions:  # a model with random weights may go on with white space to the limit
        assert each.text.startswith("{")
        assert each.finish_reason == "length" or json.loads(each.text)["a"] in ("x", "y")
        head = "".join(each.text.split())
        assert any(whole.startswith(head) for whole in ('{"a":"x"}', '{"a":"y"}'))
    assert "nonsense" in found["wrong"].error
    for before, after in zip(alone.completions, found["again"].completions, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
