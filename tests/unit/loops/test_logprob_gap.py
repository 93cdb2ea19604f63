"""Test the limit of the engine-trainer mismatch in whole runs on a real model's log-probabilities.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import pytest

from coati_rl.errors import RunError
from coati_rl.work import SyncWork, TrainWork

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


@pytest.mark.parametrize(("n_behind", "in_flight"), [(0, False), (1, False), (2, True)])
def test_sampled_tokens_are_measured_at_every_step_with_the_weights_that_sampled_them(
    run_in_threads, n_behind, in_flight
):
    # K = 2. At this learning rate one version of the weights is 0.1 nats from the next.
    fields = {"n_behind": n_behind, "inflight_update": in_flight, "num_episodes": 2, "learning_rate": 1e-2}
    trace = run_in_threads({**REAL, **fields}, hold_trainer=True)
    assert max(record["staleness_max"] for record in trace.steps) == n_behind
    assert all(0 <= record["logprob_gap_max"] < 1e-5 for record in trace.steps)
    assert all(record["logprob_gap_tokens"] >= 1 for record in trace.steps)


def test_logprob_gap_tokens__of_none_are_measured_where_earlier_weights_sampled(run_in_threads):
    trace = run_in_threads({**REAL, "logprob_gap_tokens": 0, "n_behind": 1}, hold_trainer=True)
    assert [record["logprob_gap_mean"] is None for record in trace.steps] == [False, True, True, True]
    trace = run_in_threads({**REAL, "logprob_gap_tokens": 1, "n_behind": 1}, hold_trainer=True)
    assert [record["logprob_gap_mean"] is None for record in trace.steps] == [False] * 4


def test_max_logprob_gap__stops_a_run_whose_engine_samples_from_something_else(run_in_threads):
    with pytest.raises(
        RunError, match=r"in step 1 the log-probabilities of engine and trainer differ by .* nats .*another temperature"
    ):
        run_in_threads(REAL, logprob_scale=1.5)
    trace = run_in_threads({**REAL, "max_logprob_gap": 100.0}, logprob_scale=1.5)
    assert len(trace.steps) == 4


def test_the_gate_sees_steps_all_of_whose_tokens_earlier_weights_sampled(run_in_threads):
    # K = 2 and 8 slots: what the second commit's weights sample is trained in steps 5 and 6, after the third sync.
    fields = {**REAL, "n_behind": 1, "num_episodes": 2}
    fault = {"hold_trainer": True, "logprob_scale": 1.5, "scales_after_commit": 1}
    assert len(run_in_threads({**fields, "logprob_gap_tokens": 0}, **fault).steps) == 8, "nobody looks"
    with pytest.raises(RunError, match=r"in step 5 the log-probabilities of engine and trainer differ by .* nats"):
        run_in_threads(fields, **fault)


def test_measuring_the_gap_changes_no_weight(run_in_threads):
    runs = [run_in_threads({**REAL, "logprob_gap_tokens": number}) for number in (0, 256)]
    assert [[step["logprob_gap_mean"] is None for step in run.steps] for run in runs] == [
        [False, True, False, True],
        [False, False, False, False],
    ]
    for name, weight in runs[0].weights.items():
        assert weight.equal(runs[1].weights[name])


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
    gaps = [record["logprob_gap_max"] for record in trace.steps]
    assert len(gaps) == 4
    assert max(gaps) < 1e-5  # 0.14 at a temperature of 1
