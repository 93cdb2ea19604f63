"""Test pass@k against its definition, the numerically stable product of the paper, and enumeration."""

import itertools
import math

import numpy as np
import pytest

from coati_rl.algorithms.pass_at_k import ks_of, pass_at_k, sampled_accuracy


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the correct one
        (4, 2, 2, 5 / 6),  # 1 of the 6 pairs holds none
        (4, 3, 2, 1.0),  # fewer wrong ones than samples drawn
        (4, 0, 4, 0.0),
        (1, 1, 1, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_the_estimate_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_the_estimate_is_the_share_of_k_subsets_with_a_correct_sample():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_the_estimate_is_the_papers_product():
    def of_the_paper(n, c, k):  # arXiv:2107.03374, figure 3
        return 1.0 if n - c < k else float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    for n, c, k in [(100, 3, 10), (200, 150, 64), (1000, 1, 999), (64, 64, 64)]:
        assert pass_at_k(n, c, k) == pytest.approx(of_the_paper(n, c, k), abs=1e-12)


def test_the_estimate_is_unbiased():
    # Over all outcomes of n = 5 samples that are correct with probability 0.3, its mean is 1 - 0.7^k.
    n, p = 5, 0.3
    for k in range(1, n + 1):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=f"n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_k_are_the_powers_of_two_and_n():
    assert [ks_of(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_problems_are_averaged():
    figures = sampled_accuracy([0, 1, 2], 2)
    assert figures == pytest.approx({"avg@2": 0.5, "pass@1": 0.5, "pass@2": 2 / 3})
