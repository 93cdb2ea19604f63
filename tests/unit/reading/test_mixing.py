"""Test that sources are interleaved within one draw of their shares, and that a draw follows from its number alone."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.reading.mixing import Interleaving, MixedOrder
from tests.examples import examples

TENTHS = (Fraction(3, 10), Fraction(7, 10))


@examples(120)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_every_source_is_within_one_draw_of_its_share_at_every_prefix(weights):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    mixed, counts = Interleaving(shares), [0] * len(shares)
    for number in range(2 * sum(weights) + 3):
        source, place = mixed.at(number)
        assert place == counts[source]
        counts[source] += 1
        assert all(abs(count - (number + 1) * share) < 1 for count, share in zip(counts, shares, strict=True))


def test_a_draw_follows_from_its_number():
    whole = [Interleaving(TENTHS).at(number) for number in range(40)]
    assert [Interleaving(TENTHS).at(number) for number in reversed(range(40))] == whole[::-1]
    assert Counter(source for source, _ in whole[:10]) == {0: 3, 1: 7}


def test_each_source_passes_over_its_rows_at_its_own_pace():
    order = MixedOrder([2, 3], TENTHS, seed=1)
    draws = [order.draw(number) for number in range(20)]
    first, second = ([draw for draw in draws if (draw[0] < 2) is is_first] for is_first in (True, False))
    assert [passed for _, passed in first] == [0, 0, 1, 1, 2, 2]
    assert [sorted(row for row, passed in first if passed == n) for n in range(3)] == [[0, 1]] * 3
    assert [passed for _, passed in second] == [n // 3 for n in range(14)]
    assert [sorted(row for row, passed in second if passed == n) for n in range(4)] == [[2, 3, 4]] * 4
    assert [MixedOrder([2, 3], TENTHS, seed=1).draw(number) for number in (19, 7)] == [draws[19], draws[7]]
    assert [MixedOrder([2, 3], TENTHS, seed=2).draw(number) for number in range(20)] != draws


def test_each_pass_over_a_source_has_an_order_of_its_own_and_so_has_each_source():
    order = MixedOrder([9, 9], [Fraction(1, 2)] * 2, seed=1)
    draws = [order.draw(number) for number in range(36)]
    orders = [
        tuple(row % 9 for row, passed in draws if row // 9 == source and passed == n)
        for source in (0, 1)
        for n in (0, 1)
    ]
    assert all(sorted(each) == [*range(9)] for each in orders)
    assert len({*orders}) == 4


@pytest.mark.parametrize("shares", [(Fraction(1, 2),), (Fraction(0), Fraction(1)), ()])
def test_shares_must_add_up_to_one(shares):
    with pytest.raises(ValueError, match="must be above 0, with a sum of 1"):
        Interleaving(shares)


def test_a_source_must_have_rows():
    with pytest.raises(ValueError, match="as many sources with rows"):
        MixedOrder([2, 0], TENTHS, seed=0)
