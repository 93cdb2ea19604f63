"""Answer for the arguments of other systems: what they are here, as docs/coming_from says."""

import functools
import json
from importlib.resources import files

_MOST = 2  # answers for one name


def answer_for(flag: str) -> str | None:
    """Return what an argument of OpenRLHF, RL2, TRL or verl is here; None if they have none of this name.

    Args:
        flag: as it was typed, with or without leading hyphens; hyphens and underscores are the same.
    """
    rows = _rows().get(flag.lstrip("-").replace("_", "-"))
    if rows is None:
        return None
    answers = dict.fromkeys(_answer(*row) for row in rows)
    return "; ".join([*answers][:_MOST])


def _answer(system: str, ours: str, note: str) -> str:
    told = f" ({note})" if note else ""
    if ours == "not yet":
        return f"{system} has it, Coati-RL does not yet{told}"
    if ours.startswith("no, because "):
        return f"{system} has it, and it is not needed here, {ours.removeprefix('no, ')}{told}"
    return f"{system}'s is {ours} here{told}"


@functools.cache
def _rows() -> dict[str, list[list[str]]]:
    """Return system, ours and note by argument; scripts/make_other_names.py writes the file."""
    rows: dict[str, list[list[str]]] = json.loads((files(__package__) / "other_names.json").read_text("utf-8"))
    return rows
