"""Files of JSON lines that a killed run may have left with half a line at the end."""

import json


def step_of_record(line: str) -> int | None:
    """The "step" of a line; None if there is none, or the line is not whole."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
