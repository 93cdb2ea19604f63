"""Test that RLite's printed tutorial runs here with few changed lines, which its page shows."""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_at_most_eight_lines_of_the_tutorial_change_and_the_page_shows_them():
    theirs = (ROOT / "tests/data/other_systems/rlite_tutorial.py").read_text().splitlines()
    ours = (ROOT / "docs/examples/rlite_tutorial.py").read_text().splitlines()
    changes = [line for line in difflib.unified_diff(theirs, ours, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    changes = [line for line in changes if not line.startswith("@@")]
    assert sum(line.startswith("-") for line in changes) <= 8
    assert sum(line.startswith("+") for line in changes) <= 8
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "docs/coming_from/rlite.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == changes
