"""Test the trainer's loop on sources of work without producers."""

import logging
import time
from types import SimpleNamespace

import pytest

from coati_rl.errors import RunError
from coati_rl.samples import RaggedBatch, RaggedSamples
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork, Wait
from consumer.train_loop import TrainLoop

WAIT = Wait(reason="waiting for the first shard")


class Script:
    """A source of work without producers: it answers `next_work` and nothing else; every item but the first waits."""

    __slots__ = ("_answers",)

    def __init__(self, *items):
        self._answers = {index: [WAIT, WAIT, item] if index else [item] for index, item in enumerate(items)}

    def next_work(self, index, *, rank, timeout_s):
        return self._answers[index].pop(0)


class Reports:
    """Record the trainer's reports."""

    def __init__(self):
        self.heard = []
        self.step_s = []

    def report_step(self, step, metrics):
        self.step_s.append(metrics["step_s"])
        self.heard.append(("step", step, metrics["loss"]))

    def report_saved(self, step, path):
        self.heard.append(("saved", step, path))


class Backend:
    """Notes what is saved."""

    def __init__(self):
        self.saved = []

    def save(self, directory, *, state, files, objective):
        self.saved.append((directory.name, state, files))


def train(step, *, is_last=True):
    empty = RaggedBatch(
        step=step,
        samples=RaggedSamples.of([]),
        plan=(),
        one_sample_per_row=False,
        is_last=is_last,
        loss_scale=0.0,
        learning_rate_progress=0.0,
    )
    return TrainWork(batch=empty)


@pytest.fixture
def run(tmp_path):
    """(items) -> (optimizer steps at the end, reports, checkpoints) of a loop over them."""

    def run(*items, reports=None, backend=None):
        reports, backend = reports or Reports(), backend or Backend()
        step = SimpleNamespace(
            run=lambda batch: {"loss": batch.step / 2} if batch.is_last else None, objective_state=dict
        )
        loop = TrainLoop(0, Script(*items), reports, backend, lambda _: step, is_reporter=True, checkpoint_dir=tmp_path)
        return loop.run(), reports.heard, backend.saved

    return run


def test_a_run_without_producers_trains_saves_and_ends(run, tmp_path):
    save = SaveWork(step=2, data_state={"place": 4})
    items = [train(0, is_last=False), train(0), train(1), save, FinishWork(step=2)]
    steps, heard, saved = run(*items)
    assert steps == 2
    assert heard == [("step", 0, 0.0), ("step", 1, 0.5), ("saved", 2, str(tmp_path / "step-2"))]
    assert saved == [("step-2", {"step": 2, "policy_version": 2, "data": {"place": 4}}, {})]


def test_a_step_takes_the_time_since_the_last_one_with_all_that_was_done_in_between(run):
    class SlowDisk(Backend):
        def save(self, directory, *, state, files, objective):
            time.sleep(0.03)

    reports, began = Reports(), time.perf_counter()
    items = [train(0), SaveWork(step=1, data_state={}), train(1, is_last=False), train(1), FinishWork(step=2)]
    run(*items, reports=reports, backend=SlowDisk())
    first, second = reports.step_s
    assert first > 0 and second >= 0.03
    assert first + second <= time.perf_counter() - began


def test_what_is_waited_for_is_in_the_log_once(run, caplog):
    with caplog.at_level(logging.INFO, logger="consumer.train_loop"):
        run(train(0), FinishWork(step=1))
    assert [record.getMessage() for record in caplog.records] == ["item 1: waiting for the first shard"]


def test_a_weight_sync_without_producers_is_refused(run):
    with pytest.raises(RunError, match="a weight sync to version 3 is ordered in a run without producers"):
        run(SyncWork(index=0, policy_version=3, members=()))
