"""What a row is scored against: a row's gt_answer or test_cases flow in, the ground truth as text flows out.

Which of the two is needed follows from the reward type: `code` needs test_cases, the other built-in rewards need
gt_answer, whatever else is in the sum. Functions of the user's and served models alone need neither: they get the
gt_answer, else the test_cases, else an empty text.

test_cases are {"inputs": [text], "outputs": [text]}, or JSON text of that; a list of lines is as good as a text. With
"fn_name": name, inputs and outputs may be any JSON. A list of {"input", "output"} becomes that first. Their ground
truth is the JSON of the whole object, less what is null.
"""

import json
import math
from typing import Any, Literal

from coati_rl.data.listed_tests import read_listed_tests
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import BUILT_IN_REWARDS, parse_reward_type

_FORM = '{"inputs": [...], "outputs": [...]}'

TruthKey = Literal["gt_answer", "test_cases"]


def required_truth(reward_type: str) -> TruthKey | None:
    """The key that every row must have; None: none is needed. Raises: ConfigError for an unknown reward."""
    names = [part.name for part in parse_reward_type(reward_type)]
    if "code" in names:
        return "test_cases"
    return "gt_answer" if any(name in BUILT_IN_REWARDS for name in names) else None


def ground_truth(row: dict[str, Any], required: TruthKey | None, where: str = "row") -> str:
    """The text that responses to a row are scored against.

    Args:
        row: as it was read.
        required: of `required_truth`.
        where: file and row, for messages.
    Raises: ConfigError for a row without what is required, or with something else in its place.
    """
    if required is not None and _is_missing(row.get(required)):
        raise ConfigError(f"{where}: has no {required}; every row needs messages and {required}{_other(row, required)}")
    key = required or next((key for key in ("gt_answer", "test_cases") if not _is_missing(row.get(key))), None)
    if key == "gt_answer":
        return _answer(row["gt_answer"], where)
    return json.dumps(_tests(row["test_cases"], where), ensure_ascii=False) if key == "test_cases" else ""


def _is_missing(value: object) -> bool:
    return value in (None, "", [], {})


def _other(row: dict[str, Any], required: TruthKey) -> str:
    """A hint for data of the other kind."""
    if required == "gt_answer" and not _is_missing(row.get("test_cases")):
        return " (it has test_cases: use --reward-type code)"
    if required == "test_cases" and not _is_missing(row.get("gt_answer")):
        return " for --reward-type code (it has a gt_answer: use boxed or think_answer_tags)"
    return ""


def _answer(value: object, where: str) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: gt_answer is {type(value).__name__}; write text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: gt_answer is {value}; write text or a finite number")
    return str(value)


def _tests(value: object, where: str) -> dict[str, Any]:
    """The tests as an object without nulls: a column that only some rows have is null in the others."""
    tests = {key: part for key, part in _test_object(value, where).items() if part is not None}
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    for key, part in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(part, list) or not part:
            raise ConfigError(f"{where}: test_cases has no list of {key}; write {_FORM}, one test at least")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise ConfigError(
            f"{where}: test_cases has {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs; "
            "write an output for each input"
        )
    if "fn_name" in tests:
        if not isinstance(tests["fn_name"], str) or not tests["fn_name"]:
            raise ConfigError(f"{where}: test_cases has a fn_name that is no text; name the function that is called")
        return tests
    for key in ("inputs", "outputs"):
        for number, text in enumerate(tests[key], 1):
            if not _is_text(text):
                raise ConfigError(
                    f"{where}: test_cases, test {number}: its {key[:-1]} is {type(text).__name__}; write the text that "
                    "the program reads or prints (other values need fn_name)"
                )
    return tests


def _test_object(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: test_cases is text that is not JSON ({error}); write {_FORM}") from error
    if isinstance(value, list):
        return read_listed_tests(value, where)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: test_cases is {type(value).__name__}; write {_FORM}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(line, str) for line in value))
