"""The gate on the gap between engine and trainer, in whole runs on a real model's log-probabilities.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import pytest

from coati_rl.data.work import SyncWork, TrainWork
from coati_rl.errors import RunError

REAL = {"backend": "transformers"}


def test_every_sync_is_proved_by_the_probe(run_in_threads):
    trace = run_in_threads(REAL)
    assert [event["policy_version"] for event in trace.of("sync")] == [0, 2, 4]
    assert all(event["probe_gap_max"] <= 1e-4 for event in trace.of("sync"))
    assert all(work.probe for work in trace.work if isinstance(work, SyncWork))


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_in_flight_update_is_proved_likewise(run_in_threads, in_flight):
    trace = run_in_threads({**REAL, "inflight_update": in_flight, "n_behind": 1})
    assert all(event["probe_gap_max"] <= 1e-4 for event in trace.of("sync"))
    assert max(record["staleness_max"] for record in trace.steps) <= 1


def test_max_logprob_gap__stops_a_run_whose_engine_samples_from_something_else(run_in_threads):
    with pytest.raises(RunError, match=r"in step 1 engine and trainer are .* nats apart .*another temperature"):
        run_in_threads(REAL, logprob_scale=1.5)
    trace = run_in_threads({**REAL, "max_logprob_gap": 100.0}, logprob_scale=1.5)
    assert len(trace.steps) == 4


def test_on_logprob_gap__corrects_from_the_next_step_on(run_in_threads):
    trace = run_in_threads({**REAL, "on_logprob_gap": "tis", "n_behind": 1}, logprob_scale=1.5)
    corrected = [work.is_corrected for work in trace.work if isinstance(work, TrainWork)]
    assert corrected[0] is False and corrected[-1] is True
    assert [record["correction_mean"] is not None for record in trace.steps] == corrected
    (gap,) = trace.of("gap")
    assert "the loss corrects for it from the next rollout step on" in gap["cause"]


def test_an_engine_that_stays_behind_is_found_by_its_answers(run_in_threads):
    with pytest.raises(RunError, match=r"producer-0: .* they are those of version 0 .*: stale weights"):
        run_in_threads({**REAL, "learning_rate": 1e-2}, forgets_to_commit=True)


def test_the_trainer_divides_logits_by_the_temperature_that_samples_were_drawn_at(run_in_threads):
    trace = run_in_threads({**REAL, "temperature": 0.7, "max_logprob_gap": 100.0})
    gaps = [record["logprob_gap_max"] for record in trace.steps if record["logprob_gap_tokens"]]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5  # 0.14 at a temperature of 1
