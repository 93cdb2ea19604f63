"""Test the soft over-length penalty at the boundaries of the cases of equation 13 of the DAPO paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.over_length import over_length_penalty
from tests.unit.algorithms import oracle


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (11, 0.0),
        (12, 0.0),  # L_max - L_cache
        (13, -0.25),
        (15, -0.75),
        (16, -1.0),  # L_max
        (17, -1.0),
        (1000, -1.0),
    ],
)
def test_value_below_at_and_past_the_limit_of_16_with_a_cache_of_4(length: int, penalty: float) -> None:
    assert over_length_penalty(length, max_length=16, cache_length=4) == penalty
    assert over_length_penalty(length, max_length=16, cache_length=4, scale=10.0) == 10 * penalty


def test_value_at_the_papers_sizes() -> None:
    # sec. 4.1: 16,384 tokens expected, 4,096 more as cache
    assert over_length_penalty(16384, max_length=20480, cache_length=4096) == 0.0
    assert over_length_penalty(18432, max_length=20480, cache_length=4096) == -0.5


@given(data=st.data(), max_length=st.integers(1, 5000))
def test_value_at_any_length_is_the_formulas(data: st.DataObject, max_length: int) -> None:
    cache = data.draw(st.integers(1, max_length))
    length = data.draw(st.integers(0, 2 * max_length))
    found = over_length_penalty(length, max_length=max_length, cache_length=cache)
    assert found == pytest.approx(oracle.over_length(length, max_length, cache), rel=1e-15, abs=1e-15)


def test_a_cache_as_long_as_the_limit_punishes_from_the_first_token() -> None:
    assert [over_length_penalty(n, max_length=2, cache_length=2) for n in range(4)] == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(("length", "max_length", "cache_length"), [(-1, 16, 4), (1, 16, 0), (1, 16, 17), (1, 0, 0)])
def test_refusal_names_the_lengths_that_are_out_of_range(length: int, max_length: int, cache_length: int) -> None:
    with pytest.raises(ValueError, match=f"length {length}, max_length {max_length}, cache_length {cache_length}"):
        over_length_penalty(length, max_length=max_length, cache_length=cache_length)
