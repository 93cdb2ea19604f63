"""Test work from a dataset alone: every sample once per epoch, equal on every rank, resumable at any step."""

from dataclasses import replace
from fractions import Fraction

import pytest

from coati_rl.batching.dataset_source import DatasetSettings, DatasetSource
from coati_rl.errors import ConfigError
from coati_rl.reading.mixing import Mixing
from coati_rl.reading.reward_samples import process_sample
from coati_rl.work import FinishWork, SaveWork, TrainWork
from tests.unit.numbered_samples import samples_of


def source_of(number=10, *, resumed=None, report=lambda record: None, **settings):
    sizes = {"dp": 1, "trainers_per_dp_rank": 1, "batch_size": 4, "micro_batch_size": 2, **settings}
    return DatasetSource(samples_of(number), DatasetSettings(**sizes), resumed=resumed, report=report)


def items_of(source, *, rank=0):
    items, index = [], 0
    while not items or not isinstance(items[-1], FinishWork):
        items.append(source.next_work(index, rank=rank, timeout_s=0.0))
        index += 1
    return items


def rows_of(items):
    """The samples of each optimizer step."""
    works = [item.batch for item in items if isinstance(item, TrainWork)]
    return [[int(token_ids[0]) for token_ids in batch.samples.split().token_ids] for batch in works]


def test_every_sample_comes_once_per_epoch_in_another_order_and_what_fills_no_step_is_left_over():
    rows = rows_of(items_of(source_of(num_epochs=2)))
    assert [len(row) for row in rows] == [4] * 5, "20 samples in steps of 4"
    drawn = [sample for row in rows for sample in row]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert len(rows_of(items_of(source_of()))) == 2, "2 of 10 samples are left over"


def test_samples_of_a_unit_are_drawn_together():
    rows = rows_of(items_of(source_of(unit=2, num_epochs=3)))
    pairs = [(row[i], row[i + 1]) for row in rows for i in range(0, len(row), 2)]
    assert all(first % 2 == 0 and second == first + 1 for first, second in pairs)
    assert len(set(pairs)) == 5
    with pytest.raises(ValueError, match="9 samples and steps of 4 must be multiples of 2"):
        source_of(9, unit=2)


def test_the_order_is_the_seeds():
    assert rows_of(items_of(source_of())) == rows_of(items_of(source_of()))
    assert rows_of(items_of(source_of())) != rows_of(items_of(source_of(seed=1)))


def test_a_run_saves_at_its_interval_and_at_its_end():
    kinds = [type(item).__name__ for item in items_of(source_of(num_epochs=2, save_interval=2))]
    train, save = "TrainWork", "SaveWork"
    assert kinds == [train, train, save, train, train, save, train, save, "FinishWork"]
    assert [item.step for item in items_of(source_of(max_steps=1)) if isinstance(item, SaveWork)] == [1]
    assert items_of(source_of(num_epochs=2))[-1] == FinishWork(step=5)


def test_the_ranks_of_a_copy_get_the_same_and_copies_share_out_a_step():
    source = source_of(dp=2, trainers_per_dp_rank=2)
    shares = [rows_of([source.next_work(0, rank=rank, timeout_s=0.0)])[0] for rank in range(4)]
    assert shares[0] == shares[1] and shares[2] == shares[3]
    assert sorted(shares[0] + shares[2]) == sorted(rows_of(items_of(source_of()))[0])


def test_the_loss_of_a_step_is_the_mean_over_its_loss_tokens():
    (work, *_) = items_of(source_of())
    assert work.batch.loss_scale == 1 / (4 * 3)
    assert work.batch.is_last
    assert [len(bin_) for bin_ in work.batch.plan] == [2, 2]
    assert work.batch.learning_rate_progress == 0.0


def test_a_resumed_run_goes_on_with_the_items_after_its_checkpoint():
    whole = items_of(source_of(num_epochs=2, save_interval=2))
    state = next(item for item in whole if isinstance(item, SaveWork)).data_state
    rest = items_of(source_of(num_epochs=2, save_interval=2, resumed=state))
    assert rows_of(rest) == rows_of(whole)[2:]
    assert [type(item) for item in rest] == [type(item) for item in whole[3:]]
    assert rest[0].batch.step == 2 and rest[0].batch.learning_rate_progress == 2 / 5


def test_other_data_than_the_checkpoints_is_refused_by_name():
    state = items_of(source_of())[2].data_state
    with pytest.raises(ConfigError, match="other data: num_samples, fingerprint changed"):
        source_of(12, resumed=state)
    with pytest.raises(ConfigError, match="other data: seed changed"):
        source_of(resumed=state, seed=5)


def test_a_checkpoint_of_other_labels_is_refused():
    def labelled(*labels):
        rows = (process_sample(str(n), [1, 9], [label], places=[1]) for n, label in enumerate(labels))
        return [*rows]

    def source(labels, **kwargs):
        settings = DatasetSettings(dp=1, trainers_per_dp_rank=1, batch_size=2, micro_batch_size=2)
        return DatasetSource(labelled(*labels), settings, **kwargs)

    state = items_of(source([0.0, 1.0]))[1].data_state
    assert items_of(source([0.0, 1.0], resumed=state))
    with pytest.raises(ConfigError, match="other data: fingerprint changed"):
        source([1.0, 1.0], resumed=state)


def test_a_dataset_that_fills_no_step_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="3 samples, which do not fill one step of 4; lower the batch size"):
        source_of(3)


def test_steps_are_reported_from_one():
    records = []
    source = source_of(report=records.append)
    source.report_step(0, {"loss": 0.5})
    source.report_saved(1, "runs/a/step-1")
    assert records == [
        {"event": "step", "step": 1, "policy_version": 1, "loss": 0.5},
        {"event": "checkpoint", "step": 1, "path": "runs/a/step-1"},
    ]


def test_sources_are_mixed_by_units_and_the_position_is_valid_for_the_same_shares_only():
    mixing = Mixing(sizes=(2, 8), shares=(Fraction(1, 2), Fraction(1, 2)))
    sizes = {"number": 20, "unit": 2, "batch_size": 8, "num_epochs": 2, "mixing": mixing}
    items = items_of(source_of(**sizes))
    rows = rows_of(items)
    assert [sum(sample < 4 for sample in row) for row in rows] == [4] * 5, "half of each step, though 4 of 20 samples"
    state = next(item.data_state for item in items if isinstance(item, SaveWork))
    assert rows_of(items_of(source_of(**sizes, resumed={**state, "step": 3}))) == rows[3:]
    for other in (None, replace(mixing, shares=(Fraction(1, 4), Fraction(3, 4)))):
        with pytest.raises(ConfigError, match="other data: mixing changed"):
            source_of(**{**sizes, "mixing": other}, resumed=state)


def test_the_loss_is_averaged_over_its_tokens_or_over_units():
    def scales(**settings):
        works = [item for item in items_of(source_of(**settings)) if isinstance(item, TrainWork)]
        return {work.batch.loss_scale for work in works}

    assert scales() == {1 / 12}, "4 samples of 3 loss tokens"
    assert scales(denominator="units") == {1 / 4}
    assert scales(denominator="units", unit=2) == {1 / 2}
    assert scales(denominator="units", unit=2, dp=2, micro_batch_size=4) == {1 / 2}, "of all ranks"
