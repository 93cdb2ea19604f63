"""The cosine at points whose value is known without a calculator."""

import pytest

from consumer.optim.learning_rate import cosine_learning_rate


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0.0, 1.0), (1 / 3, 0.1 + 0.9 * 0.75), (0.5, 0.55), (2 / 3, 0.1 + 0.9 * 0.25), (1.0, 0.1), (1.5, 0.1)],
)
def test_it_falls_along_half_a_cosine_to_a_tenth(progress: float, rate: float) -> None:
    assert cosine_learning_rate(progress, peak=1e-6) == pytest.approx(rate * 1e-6, rel=1e-12)


def test_it_ends_at_the_fraction_asked_for() -> None:
    assert cosine_learning_rate(1.0, peak=2.0, final_ratio=0.0) == pytest.approx(0.0, abs=1e-15)
    assert cosine_learning_rate(0.7, peak=2.0, final_ratio=1.0) == pytest.approx(2.0)


@pytest.mark.parametrize("progress", [-0.1, float("nan")])
def test_progress_before_the_start_is_refused(progress: float) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        cosine_learning_rate(progress, peak=1.0)


def test_a_final_ratio_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"final_ratio = 1.1 must lie in \[0, 1\]"):
        cosine_learning_rate(0.5, peak=1.0, final_ratio=1.1)
