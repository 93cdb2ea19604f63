"""Write coati_rl/config/other_names.json: what docs/coming_from says of the arguments of other systems, by name.

    python scripts/make_other_names.py [--check]

With --check nothing is written; the exit status is 1 if the file differs from the pages.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "coming_from"
FILE = ROOT / "coati_rl" / "config" / "other_names.json"
SYSTEMS = {"openrlhf": "OpenRLHF", "rl2": "RL2", "trl": "TRL", "verl": "verl"}
_ARGUMENT = re.compile(r"-{0,2}[A-Za-z][\w.-]*")


def text() -> str:
    """Return the file's content: argument -> [system, ours, note] of each row that names it."""
    found: dict[str, list[list[str]]] = {}
    for page, system in SYSTEMS.items():
        for theirs, ours, note in _rows((PAGES / f"{page}.md").read_text(encoding="utf-8")):
            for name in dict.fromkeys(_arguments(theirs)):
                found.setdefault(name, []).append([system, _plain(ours), _plain(note)])
    return json.dumps(found, indent=0, sort_keys=True, ensure_ascii=False) + "\n"


def _rows(page: str) -> Iterator[tuple[str, str, str]]:
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| theirs"):
            theirs, ours, note = (cell.strip() for cell in line.split("|")[1:-1])
            yield theirs, ours, note


def _arguments(theirs: str) -> Iterator[str]:
    """Yield the arguments that a cell names in backticks: whole, and the last part of a dotted one."""
    for span in re.findall(r"`([^`]+)`", theirs):
        words = re.split(r"[\s=(:]", span)
        if (match := _ARGUMENT.fullmatch(words[0])) and "/" not in span:
            name = match[0].lstrip("-").replace("_", "-")
            yield from dict.fromkeys([name, name.rpartition(".")[2]])


def _plain(cell: str) -> str:
    """Return a cell as a terminal shows it: the text of links, no backticks."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(FILE.read_text(encoding="utf-8") != text())
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
