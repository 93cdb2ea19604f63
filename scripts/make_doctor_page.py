"""Write the table of causes in docs/doctor.md from the rules, and the figures from results of doctor_matrix.py.

    python scripts/make_doctor_page.py [--check] [--results tuned.json holdout.json]

With --check nothing is written; the exit status is 1 if the table differs from the rules. Without --results the figures
stay as they are.
"""

import argparse
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from coati_rl.doctor.diagnosis import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "doctor.md"
RULES_BEGIN = "<!-- What follows is written by scripts/make_doctor_page.py. -->\n"
RULES_END = "<!-- End of the rules. -->\n"
FIGURES_BEGIN, FIGURES_END = "<!-- What follows is measured. -->\n", "<!-- End of the figures. -->\n"
HEALTHY = "healthy"


def rules() -> str:
    """Return the table of causes."""
    lines = ["| cause | what is wrong | how it is seen | leads to |", "|---|---|---|---|"]
    for rule in RULES:
        seen = " ".join((inspect.getdoc(rule.find) or "").split()).replace("|", "\\|")
        following = ", ".join(f"`{cause}`" for cause in rule.leads_to)
        lines.append(f"| `{rule.cause}` | {rule.says} | {seen} | {following} |")
    return "\n".join(lines) + "\n"


def figures(parts: list[list[dict[str, Any]]]) -> str:
    """Return the confusion matrix: a row for each fault, of the runs that were looked at and of the holdout."""
    lines = ["| fault | first, of | first in the holdout, of | what was first otherwise |", "|---|---|---|---|"]
    names = dict.fromkeys(each["fault"] for part in parts for each in part)
    for name in [*(name for name in names if name != HEALTHY), HEALTHY]:
        of_parts = [[each for each in part if each["fault"] == name] for part in parts]
        counts = [f"{sum(each['is_right'] for each in part)} of {len(part)}" if part else "-" for part in of_parts]
        wrong = Counter(each["first"] for part in of_parts for each in part if not each["is_right"])
        others = ", ".join(f"`{cause}` {number}" for cause, number in wrong.most_common())
        lines.append(f"| {'none (healthy)' if name == HEALTHY else f'`{name}`'} | {' | '.join(counts)} | {others} |")
    totals = []
    for part in parts:
        faults = [each for each in part if each["fault"] != HEALTHY]
        right = sum(each["is_right"] for each in faults)
        totals.append(f"**{right} of {len(faults)}** ({right / max(1, len(faults)):.0%})")
    lines.append(f"| all faults | {' | '.join(totals)} | |")
    return "\n".join(lines) + "\n"


def between(text: str, begin: str, end: str, written: str) -> str:
    """Return a page with the part between two lines replaced."""
    return re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{written}\n{end}", text)


def main() -> int:
    """Write or check the page. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the table differs from the rules")
    parser.add_argument("--results", type=Path, nargs=2, help="JSON of doctor_matrix.py: looked at, holdout")
    given = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    page = between(before, RULES_BEGIN, RULES_END, rules())
    if given.results:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in given.results]
        page = between(page, FIGURES_BEGIN, FIGURES_END, figures(parts))
    if given.check:
        return int(page != before)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
