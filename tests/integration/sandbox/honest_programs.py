"""Read the programs of honest/*.yaml: correct solutions in many styles, each a response with its row's tests.

A group has what is `given` and `expected` and `programs` by name (or whole `responses`, as a model writes them). With
`function` it is called, with `given` as its arguments (or `lines`, a JSON value each), and returns `expected` (or what
`outputs` says, as in a row); `cases` are tests in LiveCodeBench's form.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coati_rl.reading.ground_truth import ground_truth

FOLDER = Path(__file__).parent / "honest"


@dataclass(frozen=True, kw_only=True, slots=True)
class HonestProgram:
    """A response that is right."""

    name: str
    response: str
    tests: str  # its ground truth


def honest_programs() -> list[HonestProgram]:
    """All of them, in the order of the files."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8")):
            tests = ground_truth({"test_cases": _tests(group)}, "test_cases")
            responses = {name: f"```python\n{source}\n```" for name, source in group.get("programs", {}).items()}
            for name, response in (responses | group.get("responses", {})).items():
                found.append(HonestProgram(name=f"{path.stem}: {name}", response=response, tests=tests))
    return found


def _tests(group: dict[str, Any]) -> Any:
    if "cases" in group:
        return group["cases"]
    if "function" not in group:
        return {"inputs": [group["given"]], "outputs": [group["expected"]]}
    outputs = group.get("outputs") or [json.dumps(group["expected"])]
    return {"fn_name": group["function"], "inputs": [group.get("lines") or group["given"]], "outputs": outputs}
