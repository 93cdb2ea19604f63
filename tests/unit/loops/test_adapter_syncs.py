"""Test a run whose engines get adapters alone: what they are sent, and what stops it before a token is trained."""

from dataclasses import replace
from pathlib import Path

import pytest

from coati_rl.errors import RunError
from coati_rl.model_files.identity import model_identity, weights_identity
from producer.engines import checkpoint, fake_engine

ADAPTERS = {"lora_rank": 2, "lora_sync": "adapter"}


def test_every_sync_has_the_adapters_of_one_base_and_is_named_by_both(run_in_threads, small_run):
    trace = run_in_threads(ADAPTERS)
    syncs = trace.of("sync")
    assert [sync["policy_version"] for sync in syncs] == [0, 2, 4]
    base = model_identity(Path(small_run["model"]))
    assert [sync["identity"] for sync in syncs] == [weights_identity(base, sync["digest"]) for sync in syncs]
    assert len({sync["digest"] for sync in syncs}) == 3
    (size,) = {sync["bytes"] for sync in syncs}
    (whole,) = {sync["bytes"] for sync in run_in_threads({"lora_rank": 2, "max_steps": 1}).of("sync")}
    assert size < whole / 2


def test_an_engine_with_another_base_stops_the_run_before_a_token_is_trained(run_in_threads, monkeypatch):
    def other_base(*arguments):
        return replace(checkpoint.expect_update(*arguments), base="0" * 32)

    monkeypatch.setattr(fake_engine, "expect_update", other_base)
    problem = r"the weight sync to version 0 failed 3 times: .*the base \w+, and the engine serves .* 0{32};"
    with pytest.raises(RunError, match=problem):
        run_in_threads(ADAPTERS)
