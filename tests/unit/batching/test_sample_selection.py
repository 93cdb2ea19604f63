"""Test which samples of a step are computed: those with a gradient, and drawn ones where these are too few."""

import numpy as np
import pytest

from coati_rl.batching.sample_selection import MIN_SAMPLES, SampleSelection, SelectionSettings
from coati_rl.samples import Sample


def sample(number, advantages, num_tokens=10):
    arrays = {"advantages": advantages}
    return Sample(
        uid="p0",
        number=number,
        prefix_ids=np.arange(3),
        token_ids=np.arange(num_tokens),
        loss_mask=np.ones(num_tokens, dtype=bool),
        arrays=arrays,
    )


def constant(count, *, start=0):
    return [sample(start + number, 0.0) for number in range(count)]


def numbers(samples):
    return [each.number for each in samples]


def selected(*mini_batches, min_tokens=0, seed=0, step=0):
    """The numbers of trained and of measured samples of each mini-batch; all are of as many prompts."""
    selection = SampleSelection(SelectionSettings(min_tokens=min_tokens, seed=seed), step=step)
    parts = [selection.split(each, fraction=(i + 1) / len(mini_batches)) for i, each in enumerate(mini_batches)]
    return [(numbers(trained), numbers(measured)) for trained, measured in parts]


def test_without_settings_every_sample_is_computed_with_the_others():
    samples = [sample(0, 1.0), *constant(2, start=1)]
    assert SampleSelection(None, step=0).split(samples, fraction=1.0) == (samples, [])


def test_samples_of_advantage_0_are_left_out_if_the_others_are_enough():
    samples = [sample(number, (0.0, -0.0, 1.0, -1.0)[number % 4]) for number in range(4 * MIN_SAMPLES)]
    ((trained, measured),) = selected(samples, min_tokens=10 * 2 * MIN_SAMPLES)
    assert trained == [number for number in range(4 * MIN_SAMPLES) if number % 4 > 1]
    assert measured == []


def test_a_sample_is_computed_if_one_of_its_tokens_has_an_advantage():
    of_turns = [np.array([0.0] * 9 + [value], dtype=np.float32) for value in (1e-30, 0.0)]
    samples = [sample(number, 1.0) for number in range(MIN_SAMPLES)]
    samples += [sample(MIN_SAMPLES + number, advantages) for number, advantages in enumerate(of_turns)]
    ((trained, _),) = selected(samples)
    assert trained == [*range(MIN_SAMPLES + 1)]


@pytest.mark.parametrize(("min_tokens", "num_drawn"), [(0, MIN_SAMPLES), (201, 21), (10_000, 40)])
def test_where_none_has_a_gradient_as_many_are_drawn_as_samples_and_tokens_ask_for(min_tokens, num_drawn):
    ((trained, measured),) = selected(constant(40), min_tokens=min_tokens)
    assert trained == [] and len(set(measured)) == num_drawn
    assert measured == sorted(measured)


def test_too_few_samples_with_a_gradient_are_filled_up():
    samples = [sample(number, 1.0) for number in range(MIN_SAMPLES - 2)] + constant(30, start=100)
    ((trained, measured),) = selected(samples)
    assert len(trained) == MIN_SAMPLES - 2 and len(measured) == 2
    ((trained, measured),) = selected(samples, min_tokens=10 * (MIN_SAMPLES + 5))
    assert len(trained) == MIN_SAMPLES - 2 and len(measured) == 7


def test_the_draw_depends_on_seed_and_step_alone():
    drawn = {
        (seed, step): tuple(selected(constant(40), seed=seed, step=step)[0][1])
        for seed in (0, 1)
        for step in range(5)
        for _ in range(2)
    }
    assert len(set(drawn.values())) == 10
    assert drawn[1, 3] == tuple(selected(constant(40), seed=1, step=3)[0][1])
    found = {number for step in range(40) for number in selected(constant(40), step=step)[0][1]}
    assert found == set(range(40)), "no place is left out"


def test_each_mini_batch_of_a_step_computes_its_share():
    drawn = [len(measured) for _, measured in selected(*[constant(40)] * 4, min_tokens=400)]
    assert drawn == [10, 10, 10, 10]
    first, second = selected(constant(40), constant(40), min_tokens=100)
    assert first[1] != second[1]


def test_what_an_earlier_mini_batch_has_computed_counts_for_the_step():
    varied = [sample(number, 1.0) for number in range(3 * MIN_SAMPLES)]
    assert selected(varied, constant(40)) == [(numbers(varied), []), ([], [])]
    (_, drawn), (trained, more) = selected(constant(40), varied)
    assert (len(drawn), len(trained), more) == (MIN_SAMPLES / 2, 3 * MIN_SAMPLES, [])
