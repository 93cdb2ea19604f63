"""Read the ground truth of a row, its answer or its test_cases, as text.

The answer is in the column `gt_answer`, else in one of the usual names (`answer`, `ground_truth`, `label`);
--answer-key names another column. The reward type decides whether answer or tests are needed: `code` needs test_cases,
the other built-in rewards need an answer, whatever else is in the sum. A user's function that takes a ground truth
needs either. One that takes none, and a served model, get the answer, else the test_cases, else an empty text.

test_cases are {"inputs": [text], "outputs": [text]}, or JSON text of that; a list of lines may replace a text. With
"fn_name": name, inputs and outputs may be any JSON. A list of {"input", "output"} is converted to that first. Their
ground truth is the JSON of the whole object without nulls.
"""

import json
import math
from typing import Any, Literal

from coati_rl.errors import ConfigError
from coati_rl.reading.json_text import UnusableJsonError, parse_json
from coati_rl.reading.listed_tests import read_listed_tests
from coati_rl.reward_spec import BINARY_REWARDS, NO_REWARD, parse_reward_type

_FORM = '{"inputs": [...], "outputs": [...]}'

TruthKey = Literal["gt_answer", "test_cases", "either"]

ANSWER_KEYS = ("gt_answer", "answer", "ground_truth", "label")  # in order of precedence; all but the first must agree
_COLUMNS = f"gt_answer (or {', '.join(ANSWER_KEYS[1:])}; --answer-key names another column)"


def required_truth(reward_type: str, *, needs_truth: bool = False) -> TruthKey | None:
    """Return the kind of ground truth that every row must have; None: no kind.

    Args:
        reward_type: as of -rt.
        needs_truth: True if a user's function among them takes a ground truth.
    Raises: ConfigError for an unknown reward.
    """
    if reward_type == NO_REWARD:
        return None
    names = [part.name for part in parse_reward_type(reward_type)]
    if "code" in names:
        return "test_cases"
    if any(name in BINARY_REWARDS for name in names):
        return "gt_answer"
    return "either" if needs_truth else None


def ground_truth(
    row: dict[str, Any], required: TruthKey | None, where: str = "row", *, answer_key: str | None = None
) -> str:
    """Return the text that responses to a row are scored against.

    Args:
        row: as read from the file.
        required: of `required_truth`.
        where: file and row, for messages.
        answer_key: the column with the answer, and no other; None: the first of ANSWER_KEYS that is there.
    Raises: ConfigError for a row without the required ground truth, with one of another type, or with several answers.
    """
    has_tests = not _is_missing(row.get("test_cases"))
    key = None if required == "test_cases" else _key_of_answer(row, where, answer_key)
    if key is not None:
        return _answer(row[key], key, where)
    if has_tests and required != "gt_answer":
        return json.dumps(_tests(row["test_cases"], where), ensure_ascii=False)
    if required is not None:
        raise ConfigError(f"{where}: {_missing(row, required, answer_key)}")
    return ""


def _key_of_answer(row: dict[str, Any], where: str, answer_key: str | None) -> str | None:
    """Return the column that holds the answer; None if there is none."""
    found = [key for key in ([answer_key] if answer_key else ANSWER_KEYS) if not _is_missing(row.get(key))]
    if "gt_answer" not in found and len({str(row[key]) for key in found}) > 1:
        raise ConfigError(
            f"{where}: has {' and '.join(found)}, which differ; name the ground truth's column with --answer-key"
        )
    return found[0] if found else None


def _is_missing(value: object) -> bool:
    return value in (None, "", [], {})


def _missing(row: dict[str, Any], required: TruthKey, answer_key: str | None) -> str:
    """Return a message about what a row lacks, with a hint if its data are of another kind."""
    column = _COLUMNS if answer_key is None else f"{answer_key} (--answer-key)"
    if required == "either":
        return (
            f"has no {column} and no test_cases, and a function of --reward-type takes the ground truth: give its "
            "parameter a default if it can do without"
        )
    needed = "test_cases" if required == "test_cases" else column
    hint = ""
    if required == "gt_answer" and not _is_missing(row.get("test_cases")):
        hint = " (it has test_cases: use --reward-type code)"
    elif required == "test_cases" and any(not _is_missing(row.get(key)) for key in ANSWER_KEYS):
        hint = " for --reward-type code (it has an answer: use boxed or think_answer_tags)"
    return f"has no {needed.partition(' ')[0]}; every row needs messages and {needed}{hint}"


def _answer(value: object, key: str, where: str) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} is {type(value).__name__}; write text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {key} is {value}; write text or a finite number")
    return str(value)


def _tests(value: object, where: str) -> dict[str, Any]:
    """Return the tests as an object without nulls: a column that only some rows have is null in the others."""
    tests = {key: part for key, part in _test_object(value, where).items() if part is not None}
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    for key, part in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(part, list) or not part:
            raise ConfigError(f"{where}: test_cases has no list of {key}; write {_FORM}, with at least one test")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise ConfigError(
            f"{where}: test_cases has {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs; "
            "write an output for each input"
        )
    if "fn_name" in tests:
        if not isinstance(tests["fn_name"], str) or not tests["fn_name"]:
            raise ConfigError(f"{where}: the fn_name of test_cases is not text; write the name of a function")
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
            value = parse_json(value)
        except UnusableJsonError as error:
            raise ConfigError(f"{where}: test_cases {error}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: test_cases is text that is not JSON ({error}); write {_FORM}") from error
    if isinstance(value, list):
        return read_listed_tests(value, where)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: test_cases is {type(value).__name__}; write {_FORM}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(line, str) for line in value))
