"""Say how many examples Hypothesis draws: a sixth in the fast suite, which draws the same ones each time."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Draw `number` with --all."""
    return settings(max_examples=number // 6 if settings.default.derandomize else number, deadline=None)
