"""Test when the gap between engine and trainer is too large, and what is said of it."""

import numpy as np
import pytest

from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings

EXPECTED = np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32)


def monitor_of(*expected, **settings):
    sync = SyncConfig(**{name: settings.pop(name) for name in list(settings) if name in SyncConfig.model_fields})
    monitor = LogprobMismatchMonitor(MismatchSettings(**settings), sync)
    for version, logprobs in enumerate(expected):
        monitor.expect(version, logprobs)
    return monitor


def sampled(gap, num_tokens):
    return {"logprob_gap_mean": gap, "logprob_gap_tokens": num_tokens}


def problem_of(monitor, version, logprobs):
    return monitor.probe_problem(version, logprobs, monitor.measure(version, logprobs))


def test_a_gap_is_measured_over_the_probes_tokens():
    gap = monitor_of(EXPECTED).measure(0, EXPECTED + np.array([0, 0, 0, 0.5], dtype=np.float32))
    assert (gap.mean, gap.max) == (0.125, 0.5)


def test_nothing_is_measured_without_an_expectation_or_from_an_engine_without_log_probabilities():
    assert monitor_of(EXPECTED).measure(3, EXPECTED) is None
    assert monitor_of(EXPECTED).measure(0, np.empty(0, dtype=np.float32)) is None


def test_in_fp32_one_token_past_a_ten_thousandth_is_too_much():
    monitor = monitor_of(EXPECTED)
    assert problem_of(monitor, 0, EXPECTED + np.float32(9e-5)) is None
    apart = EXPECTED.copy()
    apart[2] += 2e-4
    assert "above the limit 0.0001" in problem_of(monitor, 0, apart)


def test_in_bf16_twice_the_mean_of_the_start_is_too_much():
    monitor = monitor_of(EXPECTED, EXPECTED, precision="bf16")
    assert problem_of(monitor, 0, EXPECTED + np.float32(0.02)) is None, "whatever it is at the start"
    assert problem_of(monitor, 0, EXPECTED + np.float32(0.03)) is None, "another producer's start counts, too"
    assert problem_of(monitor, 1, EXPECTED + np.float32(0.059)) is None
    assert "above the limit 0.06" in problem_of(monitor, 1, EXPECTED + np.float32(0.061))


def test_in_bf16_an_engine_that_is_far_off_at_the_start_is_no_measure_of_rounding():
    monitor = monitor_of(EXPECTED, precision="bf16")
    assert "above the limit 0.3" in problem_of(monitor, 0, EXPECTED + np.float32(0.5))


def test_in_bf16_a_start_without_a_gap_leaves_room_for_rounding():
    monitor = monitor_of(EXPECTED, EXPECTED, precision="bf16")
    assert problem_of(monitor, 0, EXPECTED) is None
    assert problem_of(monitor, 1, EXPECTED + np.float32(0.9e-3)) is None
    assert "above the limit 0.001" in problem_of(monitor, 1, EXPECTED + np.float32(1.1e-3))


def test_an_answer_of_another_length_or_without_numbers_is_a_problem():
    assert "it returned 3 numbers" in problem_of(monitor_of(EXPECTED), 0, EXPECTED[:3])
    assert "it returned 4 numbers" in problem_of(monitor_of(EXPECTED), 0, EXPECTED * np.float32("nan"))


def test_a_limit_that_is_given_is_for_the_mean():
    monitor = monitor_of(EXPECTED, max_logprob_gap=0.2)
    assert problem_of(monitor, 0, EXPECTED + np.array([0.7, 0, 0, 0], dtype=np.float32)) is None
    assert "above the limit 0.2" in problem_of(monitor, 0, EXPECTED + np.float32(0.3))


@pytest.mark.parametrize(
    ("answers", "diagnosis"),
    [
        (EXPECTED + np.float32(1e-5), "those of version 0 (1e-05 nats): stale weights"),
        (EXPECTED + np.float32(1.01), "of the size of bfloat16's rounding"),
        (EXPECTED * 3, "engine and trainer compute different models"),
    ],
)
def test_the_diagnosis_names_what_explains_the_gap(answers, diagnosis):
    assert diagnosis in problem_of(monitor_of(EXPECTED, EXPECTED + np.float32(1.0)), 1, answers)


def test_sampled_tokens_are_judged_once_the_probe_has_agreed():
    monitor = monitor_of(EXPECTED)
    assert monitor.sampled_problem(1, sampled(0.5, 1000)) is None, "an engine without log-probabilities"
    monitor.measure(0, EXPECTED)
    assert monitor.sampled_problem(1, sampled(None, 0)) is None, "no token of the trainer's own version"
    assert monitor.sampled_problem(1, sampled(5e-5, 1000)) is None
    coarse = monitor_of(EXPECTED, precision="bf16", max_logprob_gap=0.1)
    coarse.measure(0, EXPECTED)
    assert coarse.sampled_problem(2, sampled(0.5, 255)) is None, "too few for a mean"
    assert "in step 2 the log-probabilities of engine and trainer differ by 0.5 nats" in monitor.sampled_problem(
        2, sampled(0.5, 256)
    )


def test_a_gap_that_is_known_to_be_large_is_not_judged():
    monitor = monitor_of(EXPECTED, judges_sampled=False)
    monitor.measure(0, EXPECTED)
    assert monitor.sampled_problem(1, sampled(0.5, 1000)) is None


def test_a_low_temperature_magnifies_what_is_allowed_for_sampled_tokens():
    monitor = monitor_of(EXPECTED, temperature=0.25)
    monitor.measure(0, EXPECTED)
    assert monitor.sampled_problem(1, sampled(3.9e-4, 1000)) is None
    assert monitor.sampled_problem(1, sampled(4.1e-4, 1000)) is not None


def test_a_high_temperature_allows_no_less():
    monitor = monitor_of(EXPECTED, temperature=2.0)
    monitor.measure(0, EXPECTED)
    assert monitor.sampled_problem(1, sampled(0.9e-4, 1000)) is None
    assert monitor.sampled_problem(1, sampled(1.1e-4, 1000)) is not None


def test_the_first_problem_stops_the_run_or_is_corrected_for_and_told_once():
    stops, corrects = monitor_of(EXPECTED), monitor_of(EXPECTED, on_logprob_gap="tis")
    assert [stops.judge(problem) for problem in (None, "first", "second")] == [None, None, None]
    assert (stops.problem, stops.is_corrected) == ("first", False)
    messages = [corrects.judge(problem) for problem in (None, "first", "second")]
    assert messages == [None, "first; the loss corrects for it from the next rollout step on", None]
    assert (corrects.problem, corrects.is_corrected) == (None, True)
