"""Test when the gap between engine and trainer is too large, and what is said of it."""

import numpy as np
import pytest

from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings

EXPECTED = np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32)


def gate_of(*expected, **settings):
    gate = LogprobMismatchMonitor(MismatchSettings(**settings))
    for version, logprobs in enumerate(expected):
        gate.expect(version, logprobs)
    return gate


def sampled(gap, num_tokens):
    return {"logprob_gap_mean": gap, "logprob_gap_tokens": num_tokens}


def problem_of(gate, version, logprobs):
    return gate.probe_problem(version, logprobs, gate.measure(version, logprobs))


def test_a_gap_is_measured_over_the_probes_tokens():
    gap = gate_of(EXPECTED).measure(0, EXPECTED + np.array([0, 0, 0, 0.5], dtype=np.float32))
    assert (gap.mean, gap.max) == (0.125, 0.5)


def test_nothing_is_measured_without_an_expectation_or_from_an_engine_without_log_probabilities():
    assert gate_of(EXPECTED).measure(3, EXPECTED) is None
    assert gate_of(EXPECTED).measure(0, np.empty(0, dtype=np.float32)) is None


def test_in_fp32_one_token_past_a_ten_thousandth_is_too_much():
    gate = gate_of(EXPECTED)
    assert problem_of(gate, 0, EXPECTED + np.float32(9e-5)) is None
    apart = EXPECTED.copy()
    apart[2] += 2e-4
    assert "past 0.0001" in problem_of(gate, 0, apart)


def test_in_bf16_twice_the_mean_of_the_start_is_too_much():
    gate = gate_of(EXPECTED, EXPECTED, precision="bf16")
    assert problem_of(gate, 0, EXPECTED + np.float32(0.02)) is None, "whatever it is at the start"
    assert problem_of(gate, 0, EXPECTED + np.float32(0.03)) is None, "another producer's start counts, too"
    assert problem_of(gate, 1, EXPECTED + np.float32(0.059)) is None
    assert "past 0.06" in problem_of(gate, 1, EXPECTED + np.float32(0.061))


def test_in_bf16_an_engine_that_is_far_off_at_the_start_is_no_measure_of_rounding():
    gate = gate_of(EXPECTED, precision="bf16")
    assert "past 0.3" in problem_of(gate, 0, EXPECTED + np.float32(0.5))


def test_in_bf16_a_start_without_a_gap_leaves_room_for_rounding():
    gate = gate_of(EXPECTED, EXPECTED, precision="bf16")
    assert problem_of(gate, 0, EXPECTED) is None
    assert problem_of(gate, 1, EXPECTED + np.float32(0.9e-3)) is None
    assert "past 0.001" in problem_of(gate, 1, EXPECTED + np.float32(1.1e-3))


def test_an_answer_of_another_length_or_without_numbers_is_a_problem():
    assert "it answers with 3 numbers" in problem_of(gate_of(EXPECTED), 0, EXPECTED[:3])
    assert "it answers with 4 numbers" in problem_of(gate_of(EXPECTED), 0, EXPECTED * np.float32("nan"))


def test_a_limit_that_is_given_is_for_the_mean():
    gate = gate_of(EXPECTED, limit=0.2)
    assert problem_of(gate, 0, EXPECTED + np.array([0.7, 0, 0, 0], dtype=np.float32)) is None
    assert "past 0.2" in problem_of(gate, 0, EXPECTED + np.float32(0.3))


@pytest.mark.parametrize(
    ("answers", "diagnosis"),
    [
        (EXPECTED + np.float32(1e-5), "those of version 0 (1e-05 nats): stale weights"),
        (EXPECTED + np.float32(1.01), "of the size of bfloat16's rounding"),
        (EXPECTED * 3, "engine and trainer compute different models"),
    ],
)
def test_the_diagnosis_names_what_explains_the_gap(answers, diagnosis):
    assert diagnosis in problem_of(gate_of(EXPECTED, EXPECTED + np.float32(1.0)), 1, answers)


def test_sampled_tokens_are_judged_once_the_probe_has_agreed():
    gate = gate_of(EXPECTED)
    assert gate.sampled_problem(1, sampled(0.5, 1000)) is None, "an engine without log-probabilities"
    gate.measure(0, EXPECTED)
    assert gate.sampled_problem(1, sampled(None, 0)) is None, "no token of the trainer's own version"
    assert gate.sampled_problem(1, sampled(5e-5, 1000)) is None
    coarse = gate_of(EXPECTED, precision="bf16", limit=0.1)
    coarse.measure(0, EXPECTED)
    assert coarse.sampled_problem(2, sampled(0.5, 255)) is None, "too few for a mean"
    assert "in step 2 engine and trainer are 0.5 nats apart" in gate.sampled_problem(2, sampled(0.5, 256))


def test_a_gap_that_is_known_to_be_large_is_not_judged():
    gate = gate_of(EXPECTED, judges_sampled=False)
    gate.measure(0, EXPECTED)
    assert gate.sampled_problem(1, sampled(0.5, 1000)) is None


def test_a_low_temperature_magnifies_what_is_allowed_for_sampled_tokens():
    gate = gate_of(EXPECTED, temperature=0.25)
    gate.measure(0, EXPECTED)
    assert gate.sampled_problem(1, sampled(3.9e-4, 1000)) is None
    assert gate.sampled_problem(1, sampled(4.1e-4, 1000)) is not None


def test_the_first_problem_stops_the_run_or_is_corrected_for_and_told_once():
    stops, corrects = gate_of(EXPECTED), gate_of(EXPECTED, on_gap="tis")
    assert [stops.judge(problem) for problem in (None, "first", "second")] == [None, None, None]
    assert (stops.problem, stops.is_corrected) == ("first", False)
    messages = [corrects.judge(problem) for problem in (None, "first", "second")]
    assert messages == [None, "first; the loss corrects for it from the next rollout step on", None]
    assert (corrects.problem, corrects.is_corrected) == (None, True)
