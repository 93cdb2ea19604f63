"""Test which events become records, and where they go."""

from types import SimpleNamespace

import pytest

from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.driver.event_recorder import EventRecorder
from coati_rl.driver.loading import LoadingLines
from coati_rl.observability.sampled_answer import SampledAnswer

LEFT_OF_THE_MACHINE = ("memory_available_gib", "disk_free_gib")
ANSWER = SampledAnswer(step=3, prompt="1 + 1?", answer="2", truth="2", reward=1.0, verdict="ok")


class Notes:
    """A sink and a display at once."""

    def __init__(self):
        self.written, self.answers, self.shown, self.lines = [], [], [], []

    def write(self, step, record):
        self.written.append((step, record))

    def write_answer(self, step, answer):
        self.answers.append((step, answer))

    def show(self, event):
        self.shown.append(event)

    def show_answer(self, answer):
        self.shown.append(answer)

    def print_line(self, line):
        self.lines.append(line)


@pytest.fixture
def notes():
    return SimpleNamespace(display=Notes(), jsonl=Notes(), tensorboard=Notes(), syncs=Notes())


@pytest.fixture
def record(notes, tmp_path):
    """Record an event; `answer` is due with it."""
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    config = Config(model=str(tmp_path), num_trainers=1, num_inferencer=2)
    loading = LoadingLines(config, now=iter((0.0, 2.0, 3.0, 4.0)).__next__)

    def record(event, answer=None):
        EventRecorder(
            display=notes.display,
            loading=loading,
            sinks=[notes.jsonl, notes.tensorboard],
            syncs=notes.syncs,
            answers=SimpleNamespace(take=lambda step: answer),
            run_dir=tmp_path,
        ).record(event)
        assert notes.display.shown[-1] == event
        return notes.jsonl.written, notes.tensorboard.written, notes.syncs.written

    return record


def test_a_step_is_the_same_record_in_every_sink(record):
    jsonl, tensorboard, syncs = record({"event": "step", "step": 3, "loss": 0.5})
    assert jsonl == tensorboard and syncs == []
    ((step, found),) = jsonl
    of_machine = {name: found[name] for name in ("cpu_busy_fraction", *LEFT_OF_THE_MACHINE)}
    assert (step, found) == (3, {"step": 3, "loss": 0.5} | of_machine)
    assert all(found[name] > 0 for name in LEFT_OF_THE_MACHINE)
    assert 0 <= found["cpu_busy_fraction"] <= 1


def test_what_the_machine_has_left_is_unknown_where_its_disk_does_not_say(record, monkeypatch):
    monkeypatch.setattr("coati_rl.driver.host_metrics.free_bytes", lambda path: (_ for _ in ()).throw(OSError("stale")))
    jsonl, *_ = record({"event": "step", "step": 3})
    assert jsonl[0][1]["disk_free_gib"] is None


def test_an_answer_is_shown_and_in_the_charts(record, notes):
    record({"event": "step", "step": 3, "loss": 0.5}, ANSWER)
    assert notes.display.shown[0] == ANSWER and notes.tensorboard.answers == [(3, ANSWER)]


def test_an_evaluation_is_a_curve_but_no_line_of_metrics_jsonl(record):
    jsonl, tensorboard, syncs = record({"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.75})
    assert jsonl == syncs == []
    assert tensorboard == [(4, {"eval/math/accuracy": 0.75})]


def test_a_weight_sync_is_a_line_of_syncs_jsonl(record):
    details = {"producers": [0, 2], "seconds": 0.5, "digest": "a1", "identity": "b2", "bytes": 640}
    details |= {"commit_s": 0.02, "probe_gap_mean": 1e-7, "probe_gap_max": 3e-7}
    jsonl, tensorboard, syncs = record({"event": "sync", "policy_version": 4, **details})
    assert jsonl == tensorboard == []
    assert syncs == [(4, {"step": 4, **details})]


def test_other_events_are_shown_only(record):
    assert record({"event": "checkpoint", "step": 4, "path": "p"}) == ([], [], [])


def test_when_all_producers_have_loaded_the_model_is_told_once_and_each_that_joins_later(record, notes, tmp_path):
    for producer in (0, 1, 2):  # the third one replaces another
        record({"event": "producer_joined", "producer": producer})
    loaded = f"2 producers have loaded the model ({tmp_path.name}, 0.000977 GiB) in 2.0 s"
    assert notes.display.lines == [loaded, "producer 2 has joined"]


def test_what_is_loaded_is_told_with_its_size(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(2**20))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(2**20))
    loading = LoadingLines(build_job({"model": str(tmp_path)}, OFFLINE["sft"]), now=iter((10.0, 14.25)).__next__)
    assert loading.with_model("starting: 0 of 1 trainer loaded") == (
        f"starting: 0 of 1 trainer loaded ({tmp_path.name}, 0.00195 GiB)"
    )
    assert loading.trainers() == f"1 trainer has loaded the model ({tmp_path.name}, 0.00195 GiB) in 4.2 s"
    assert (
        LoadingLines(Config(model="Qwen/Qwen3-0.6B")).with_model("starting: Ray") == "starting: Ray (Qwen/Qwen3-0.6B)"
    )
