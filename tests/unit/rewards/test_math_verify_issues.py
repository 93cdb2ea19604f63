"""Test the verdicts of pairs from math-verify's own issues (14, 41, 44, 60, 2, 76) and of their neighbours.

tests/data/math_verify_issues.jsonl has an answer, its ground truth and the verdict in each line. Where that is not the
one of a person, docs/rewards.md says why: 72:1 is a time or a ratio, and a ground truth with dots is not read.
"""

import json
from pathlib import Path

import pytest

from rewards.math.math_answer import check_answer

FILE = Path(__file__).parents[2] / "data" / "math_verify_issues.jsonl"
PAIRS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").split("\n")[:-1]]


def assert_verdicts(pairs: list[list[str]]) -> None:
    found = [[answer, truth, check_answer(answer, truth, must_be_number=True).verdict] for answer, truth, _ in pairs]
    assert found == pairs


def test_every_fifth_pair_of_math_verify_s_issues_has_its_verdict() -> None:
    assert len(PAIRS) == 173
    assert_verdicts(PAIRS[::5])


@pytest.mark.full
def test_every_pair_of_math_verify_s_issues_has_its_verdict() -> None:
    assert_verdicts(PAIRS)
