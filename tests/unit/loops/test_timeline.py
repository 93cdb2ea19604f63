"""Test the timeline of a run: who is busy with what, and waiting times in the metrics."""

import json
import time
from statistics import median

import pytest

from coati_rl.observability.trace_file import write_trace
from consumer.backend import Backend
from tests.unit.loops.harness import parity_reward
from tests.unit.observability.trace_format import check_format


def shares(trace, name):
    return [record[name] for record in trace.steps]


@pytest.fixture(scope="module")
def trace(run_in_threads):
    return run_in_threads({"algo": "GRPO"})


def test_every_step_says_how_idle_trainers_and_producers_were(trace):
    assert len(trace.steps) == 4
    for name in ("trainer_idle_fraction", "producer_idle_fraction"):
        assert all(0.0 <= share <= 1.0 for share in shares(trace, name))
        assert any(share > 0.0 for share in shares(trace, name)), "in lockstep each waits for the other"


@pytest.mark.full
def test_a_trainer_that_is_short_of_rollouts_is_idle(run_in_threads):
    def slow_reward(response, ground_truth):
        time.sleep(0.1)  # 0.4 s a step, of which an optimizer step takes a small part
        return parity_reward(response, ground_truth)

    trace = run_in_threads(score=slow_reward)
    # The median: one step may be slow for another reason.
    assert median(shares(trace, "trainer_idle_fraction")) > 0.5
    assert median(shares(trace, "producer_idle_fraction")) < 0.5


@pytest.mark.full
def test_a_producer_that_waits_for_new_weights_is_idle(run_in_threads, monkeypatch):
    step = Backend.optimizer_step

    def slow_step(self, **options):
        time.sleep(0.4)
        return step(self, **options)

    monkeypatch.setattr(Backend, "optimizer_step", slow_step)
    trace = run_in_threads({"n_behind": 0})
    assert median(shares(trace, "producer_idle_fraction")[1:]) > 0.5
    assert median(shares(trace, "trainer_idle_fraction")[1:]) < 0.5


def test_the_timeline_shows_what_each_actor_did(trace):
    events = json.loads(write_trace(trace.paths.run_dir).read_text())["traceEvents"]
    check_format(events)
    actors = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    done = {(actors[e["pid"]], e["name"]) for e in events if e["ph"] in ("X", "i", "b")}
    assert done == {
        *(("trainer-0", name) for name in ("wait for work", "train", "score reference", "forward_backward")),
        *(("trainer-0", name) for name in ("score version", "optimizer step", "sync", "save")),
        *(("producer-0", name) for name in ("generate", "score", "wait for prompts")),
        *(("producer-0", name) for name in ("stage weights", "commit weights", "policy version")),
    }


def test_a_prompt_is_generated_and_scored_once(trace):
    events = json.loads(write_trace(trace.paths.run_dir).read_text())["traceEvents"]
    for name in ("generate", "score"):
        uids = [e["args"]["uid"] for e in events if e["ph"] == "b" and e["name"] == name]
        assert sorted(uids) == [f"train-{i}.0" for i in range(8)]
