"""One record a step, in the order of steps."""

from coati_rl.coordinator.step_records import StepRecords


def test_a_record_is_the_rollouts_statistics_and_the_trainers_metrics():
    records = StepRecords(first_step=0, time_s=0.0)
    records.open(0, {"reward_mean": 0.5})
    assert not records.is_complete
    (record,) = records.report(0, {"loss": 0.1})
    assert record.pop("time_s") < 60
    assert record == {"step": 1, "policy_version": 1, "reward_mean": 0.5, "loss": 0.1}
    assert records.is_complete


def test_a_step_that_is_reported_early_waits_for_the_one_before():
    records = StepRecords(first_step=7, time_s=100.0)
    for step in (7, 8, 9):
        records.open(step, {})
    assert records.report(9, {}) == []
    assert [record["step"] for record in records.report(7, {})] == [8]
    assert not records.is_complete
    (eighth, ninth) = records.report(8, {})
    assert (eighth["step"], ninth["step"]) == (9, 10)
    assert 100.0 < ninth["time_s"] < eighth["time_s"] < 160.0, "of the moment when each was done"
    assert records.is_complete
