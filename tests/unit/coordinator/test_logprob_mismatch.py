"""Test when the gap between engine and trainer is too large, and what is said of it."""

import numpy as np
import pytest

from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor, MismatchSettings

EXPECTED = np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32)
PROBE = np.full(64, -2.0, dtype=np.float32)
SIGNS = np.tile(np.array([1.0, -1.0], dtype=np.float32), 32)


def monitor_of(*expected, **settings):
    sync = SyncConfig(**{name: settings.pop(name) for name in list(settings) if name in SyncConfig.model_fields})
    monitor = LogprobMismatchMonitor(MismatchSettings(**settings), sync)
    for version, logprobs in enumerate(expected):
        monitor.expect(version, logprobs)
    return monitor


def sampled(gap, num_tokens, *, rounding=None, shift=0.0, of=256):
    metrics = {"logprob_gap_mean": gap, "logprob_gap_tokens": num_tokens, "logprob_rounding_tokens": 0}
    if rounding is None:
        return metrics
    names = ("logprob_rounding_mean", "logprob_rounding_rms", "logprob_shift_mean", "logprob_rounding_tokens")
    return metrics | dict(zip(names, (rounding, rounding, shift, of), strict=True))


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


def bf16_monitor(rounding=0.01):
    """One whose trainer is off from float32 by `rounding` on 64 tokens of the probe, half of them above."""
    monitor = LogprobMismatchMonitor(MismatchSettings(precision="bf16"), SyncConfig())
    monitor.expect(0, PROBE, PROBE + np.float32(rounding) * SIGNS)
    return monitor


def test_in_bf16_twice_the_trainers_own_rounding_of_the_probe_is_too_much():
    assert problem_of(bf16_monitor(), 0, PROBE + 0.0199 * SIGNS) is None
    assert problem_of(bf16_monitor(0.02), 0, PROBE + 0.021 * SIGNS) is None
    problem = problem_of(bf16_monitor(), 0, PROBE + 0.021 * SIGNS)
    assert "0.021 (largest) from the trainer's, above the limit 0.02" in problem
    assert "(the trainer's own rounding: 0.01, bfloat16 against float32 on 64 tokens)" in problem
    assert "engine and trainer compute different models" in problem


def test_in_bf16_the_rounding_of_the_probe_is_what_was_measured_last():
    monitor = bf16_monitor()
    monitor.expect(1, PROBE, PROBE + np.float32(0.03) * SIGNS)
    assert problem_of(monitor, 1, PROBE + 0.05 * SIGNS) is None
    moved = PROBE + np.float32(1.0)
    monitor.expect(2, moved)
    assert problem_of(monitor, 2, moved + 0.05 * SIGNS) is None
    assert "above the limit 0.06 (the trainer's own rounding: 0.03" in problem_of(monitor, 2, moved + 0.07 * SIGNS)
    monitor.expect(3, PROBE, PROBE + np.float32(0.01) * SIGNS)
    assert "above the limit 0.02" in problem_of(monitor, 3, PROBE + 0.05 * SIGNS)


def test_in_bf16_a_shift_of_the_probe_is_too_much_where_its_size_is_not():
    monitor = bf16_monitor()
    assert problem_of(monitor, 0, PROBE + np.float32(0.0024)) is None
    problem = problem_of(monitor, 0, PROBE + np.float32(0.003))
    assert "shifted by +0.003, where rounding explains 0.0025" in problem
    assert "above the limit" not in problem


def test_in_bf16_a_model_that_bfloat16_makes_useless_is_told_so():
    problem = problem_of(bf16_monitor(0.4), 0, PROBE + 0.5 * SIGNS)
    assert "above the limit 0.3" in problem
    assert "bfloat16 explains it; use --precision fp32, or --max-logprob-gap to accept it" in problem


def test_in_bf16_the_first_gap_is_judged_like_any_other():
    assert "above the limit 0.3" in problem_of(monitor_of(EXPECTED, precision="bf16"), 0, EXPECTED + np.float32(0.5))
    monitor = bf16_monitor()
    monitor.measure(0, PROBE)
    problem = monitor.sampled_problem(1, sampled(0.25, 1000, rounding=0.01))
    assert "in step 1 the log-probabilities of engine and trainer differ by 0.25 nats" in problem
    assert "above the limit 0.02 (the trainer's own rounding: 0.01, bfloat16 against float32 on 256 tokens)" in problem


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
    assert "in step 2 the log-probabilities of engine and trainer differ by 0.5 nats" in monitor.sampled_problem(
        2, sampled(0.5, 256)
    )


def test_in_bf16_sampled_tokens_are_judged_once_the_rounding_of_256_of_them_is_known():
    monitor = bf16_monitor()
    monitor.measure(0, PROBE)
    assert monitor.sampled_problem(1, sampled(0.25, 1000)) is None, "nothing was scored in float32"
    assert monitor.sampled_problem(2, sampled(0.25, 128, rounding=0.01, of=128)) is None
    assert "on 256 tokens" in monitor.sampled_problem(3, sampled(0.25, 128, rounding=0.01, of=128))
    assert monitor.sampled_problem(4, sampled(0.019, 3, rounding=0.01)) is None


def test_in_bf16_the_rounding_of_sampled_tokens_is_that_of_the_last_eight_steps_that_measured_it():
    monitor = bf16_monitor()
    monitor.measure(0, PROBE)
    for step in range(1, 9):
        assert monitor.sampled_problem(step, sampled(0.05, 10**6, rounding=0.04)) is None
        assert monitor.sampled_problem(step, sampled(0.05, 10**6)) is None
    problems = [monitor.sampled_problem(step, sampled(0.05, 10**6, rounding=0.01)) for step in range(9, 17)]
    assert problems[0] is None
    assert "(the trainer's own rounding: 0.01," in problems[-1]


def test_in_bf16_a_shift_of_sampled_tokens_is_added_up_over_steps():
    monitor = bf16_monitor()
    monitor.measure(0, PROBE)
    assert monitor.sampled_problem(1, sampled(0.01, 256, rounding=0.01, shift=0.002)) is None
    problem = monitor.sampled_problem(2, sampled(0.01, 256, rounding=0.01, shift=0.004))
    assert "and are shifted by +0.003, where rounding explains 0.0025" in problem


def test_a_limit_that_is_given_takes_the_place_of_rounding():
    monitor = monitor_of(EXPECTED, precision="bf16", max_logprob_gap=0.1)
    monitor.measure(0, EXPECTED)
    assert monitor.sampled_problem(1, sampled(0.09, 3)) is None
    assert "above the limit 0.1, while" in monitor.sampled_problem(2, sampled(0.11, 3))


def test_the_cause_says_whether_the_weights_that_moved_may_explain_a_gap():
    for expected, gap, cause in (
        ([EXPECTED], 0.5, "engine and trainer differ on the same weights. Both"),
        ([EXPECTED, EXPECTED + np.float32(0.1)], 0.5, "same weights (the last sync moved the probe by 0.1 only)"),
        (
            [EXPECTED, EXPECTED + np.float32(0.1)],
            0.15,
            "moved between (the last sync moved the probe by 0.1) if tokens",
        ),
    ):
        monitor = monitor_of(*expected)
        monitor.measure(0, EXPECTED)
        assert cause in monitor.sampled_problem(2, sampled(gap, 1000))
    coarse = bf16_monitor()
    coarse.measure(0, PROBE)
    assert "bfloat16 explains it; use --precision fp32" in coarse.sampled_problem(1, sampled(0.7, 256, rounding=0.4))


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
