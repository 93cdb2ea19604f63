"""Read the rows of offline jobs, in the formats of RL2, OpenRLHF and TRL, into forms.

Which columns a row has decides its format; flags such as --prompt-key name columns that are called otherwise. A text
that is a prompt or its completion becomes a message of the user or the assistant, unless --input-template says how the
text is to be written. A row in no format of its job is refused, with the nearest one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Content, Conversation, Form, Labelled, Pair, Steps, Text
from coati_rl.reading.row_contents import completions_of, content_of, paired_completions, step_labels, truth_of_label
from coati_rl.reading.row_messages import (
    conversation_of,
    is_completion,
    is_missing,
    messages_of_value,
    plain_messages,
    template_options_of,
    tools_of,
)

_PAIRS = (("messages", "chosen", "rejected"), ("prompt", "chosen", "rejected"), ("chosen", "rejected"))
_LABELLED = (("messages", "completion", "label"), ("prompt", "completion", "label"), ("completion", "label"))
FORMATS: Mapping[str, tuple[tuple[str, ...], ...]] = {  # the columns of each format of a job
    "sft": (("messages",), ("prompt", "completion"), ("text",)),
    "rm": _PAIRS,
    "dpo": _PAIRS,
    "kto": (*_LABELLED, *_PAIRS),
    "prm": (("prompt", "completions", "labels"), ("input", "label")),
}
_FLAGS = {
    "prompt": "--prompt-key",
    "completion": "--output-key",
    "chosen": "--chosen-key",
    "rejected": "--rejected-key",
    "label": "--label-key",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Name the columns that are not called as in the formats, and how text is written; None: the usual way."""

    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    input_template: str | None = None  # "{}" stands for the prompt's text; prompt and completion are then plain text
    step_token: str | None = None  # marks the end of each step in the text of a row {"input", "label"}

    @property
    def named(self) -> dict[str, str]:
        """Return the given columns by the name that they have in the formats."""
        names = {key: getattr(self, key) for key in _FLAGS}
        return {key: name for key, name in names.items() if name is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class FormSet:
    """Hold the forms of a dataset, in the order of its rows, and how many rows make none."""

    forms: tuple[Form, ...]
    num_equal: int = 0  # pairs left out because chosen and rejected are equal: they prefer nothing
    num_undecided: int = 0  # rollouts left out because their reward is undecided


def read_forms(rows: Iterable[tuple[str, Any]], job: str, columns: Columns | None = None) -> FormSet:
    """Return the forms of rows.

    Args:
        rows: each with flag, file and row or line, for messages.
        job: which formats are read.
        columns: of the dataset.
    Raises: ConfigError for a row in no format of the job, or with a wrong value.
    """
    columns, forms, num_equal = columns or Columns(), list[Form](), 0
    for where, row in rows:
        made = _read(_with_usual_names(row, job, columns, where), job, columns, where)
        num_equal += made is None
        forms += made or ()
    return FormSet(forms=tuple(forms), num_equal=num_equal)


def _with_usual_names(row: Any, job: str, columns: Columns, where: str) -> dict[str, Any]:
    """Return a row with its columns as they are called in the formats, without those that hold nothing."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: is {type(row).__name__}; write an object with {_listed(FORMATS[job][0])}")
    named = columns.named
    for key, name in named.items():
        if row.get(name) is None:
            raise ConfigError(f"{where}: has no {name} ({_FLAGS[key]}); its columns are {_listed(row)}")
    taken = set(named.values()) | ({"messages"} if "prompt" in named else set())
    renamed = {key: value for key, value in row.items() if key not in taken and value is not None}
    renamed |= {_usual_name(key, row[name], job, columns): row[name] for key, name in named.items()}
    return renamed


def _usual_name(key: str, value: object, job: str, columns: Columns) -> str:
    """Return what the column of a flag is called in the formats of a job."""
    if job == "prm":  # one text of all steps, unless --output-key names a list of them
        in_text = {"prompt": "input"}
        return (in_text if columns.completion is None else {"completion": "completions", "label": "labels"}).get(
            key, key
        )
    if job == "sft" and key == "prompt" and columns.completion is None:
        return "text" if isinstance(value, str) and messages_of_value(value) is None else "messages"
    return key


def _read(row: dict[str, Any], job: str, columns: Columns, where: str) -> Sequence[Form] | None:
    """Return the forms of a row; None for a pair of equal completions."""
    row, present = _format_of(row, job)
    if present is None:
        raise ConfigError(f"{where}: {_refusal(row, job)}")
    if job == "sft":
        return [_supervised(row, present, columns, where)]
    if job == "prm":
        return [_stepwise(row, present, columns, where)]
    pair = _pair(row, columns, where) if "chosen" in present else None
    if job != "kto":
        return None if pair is None else [pair]
    if "chosen" not in present:
        prompt, completion = completions_of(_prompt(row), row["completion"], columns.input_template, where)
        label = truth_of_label(row["label"], f"{where}: its label")
        return [Labelled(prompt=prompt, completion=completion, label=label, **_rendered_with(row, where))]
    if pair is None:
        return None
    both = ((pair.chosen, True), (pair.rejected, False))
    given = _rendered_with(row, where)
    return [Labelled(prompt=pair.prompt, completion=text, label=label, **given) for text, label in both]


def _format_of(row: dict[str, Any], job: str) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Return a row and the columns of its format; an empty column, as in CSV, counts where there is no other format.

    Without `messages` and `prompt`, the column `conversations` stands in their place: for `sft` in a row of no other
    format, for other jobs beside completions that do not hold their prompt.
    """
    held = {key for key, value in row.items() if not is_missing(value)}
    choices = [(row, held), (row, {*row})]
    conversation = None if held & {"messages", "prompt"} else conversation_of(row)
    if conversation is not None:
        is_prompt = job != "sft" and is_completion(row.get("chosen", row.get("completion")))
        choices.insert(0 if is_prompt else 1, ({**row, "messages": conversation}, {*held, "messages"}))
    found = ((each, keys) for each, given in choices for keys in FORMATS[job] if given.issuperset(keys))
    return next(found, (row, None))


def _rendered_with(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a form that the chat template reads besides messages, and where the row is."""
    return {"tools": tools_of(row, where), "options": template_options_of(row, where), "where": where}


def _supervised(row: dict[str, Any], present: tuple[str, ...], columns: Columns, where: str) -> Form:
    if present == ("messages",):
        messages = messages_of_value(row["messages"])
        if messages is None:
            raise ConfigError(f'{where}: messages is {type(row["messages"]).__name__}; write a list of {{"role", ...}}')
        return _conversation(plain_messages(messages, "messages", where), row, where)
    if present == ("text",):
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise ConfigError(f"{where}: its text is empty, or no text")
        return Text(text=row["text"], where=where)
    prompt, completion = completions_of(row["prompt"], row["completion"], columns.input_template, where)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt=prompt, text=completion, where=where)
    return _conversation((*prompt, *completion), row, where)


def _conversation(messages: Any, row: dict[str, Any], where: str) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: no message has the role assistant; every row needs one")
    return Conversation(messages=tuple(messages), **_rendered_with(row, where))


def _pair(row: dict[str, Any], columns: Columns, where: str) -> Pair | None:
    prompt, chosen, rejected = paired_completions(
        _prompt(row), row["chosen"], row["rejected"], columns.input_template, where
    )
    margin = _margin(row.get("margin") or 0.0, where)  # empty in CSV
    if chosen == rejected:
        return None
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin, **_rendered_with(row, where))


def _prompt(row: dict[str, Any]) -> Any:
    """Return the prompt of completions: of `prompt` before `messages`, which may be a whole conversation beside it."""
    return next((row[key] for key in ("prompt", "messages") if not is_missing(row.get(key))), None)


def _margin(value: Any, where: str) -> float:
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ConfigError(f"{where}: its margin is {value!r}; write a number")
    return margin


def _stepwise(row: dict[str, Any], present: tuple[str, ...], columns: Columns, where: str) -> Steps:
    prompt: Content
    if "completions" in present:
        steps, labels = row["completions"], row["labels"]
        said = [isinstance(step, str) and bool(step.strip()) for step in steps] if isinstance(steps, list) else []
        if not said or not all(said):
            raise ConfigError(f"{where}: completions is no list of texts that say something; write one for each step")
        prompt = content_of(row["prompt"], "prompt", where)
        if isinstance(prompt, str):
            template = columns.input_template
            prompt = ({"role": "user", "content": prompt},) if template is None else template.replace("{}", prompt)
    else:
        steps, labels, prompt = _marked_steps(row["input"], columns.step_token, where), row["label"], ""
    values = step_labels(labels, where)
    if len(values) != len(steps):
        raise ConfigError(f"{where}: has {len(steps)} steps and {len(values)} labels; write a label for each step")
    return Steps(prompt=prompt, steps=tuple(steps), labels=values, **_rendered_with(row, where))


def _marked_steps(text: Any, mark: str | None, where: str) -> list[str]:
    """Return the texts before each mark; what follows the last one is blank."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: its input is {type(text).__name__}; write text with a mark after each step")
    if mark is None:
        raise ConfigError(f"{where}: is one text of all steps; name the text after each step with --placeholder-token")
    *steps, rest = text.split(mark)
    if not steps or rest.strip():
        raise ConfigError(f"{where}: its last step does not end with {mark!r} (--placeholder-token)")
    return steps


def _refusal(row: Mapping[str, Any], job: str) -> str:
    """Say what a row lacks: of the nearest format of its job, or that it is a row of another job."""
    nearest = max(FORMATS[job], key=lambda each: (sum(key in row for key in each), -len(each)))
    missing = [key for key in nearest if key not in row]
    flags = [f"{_FLAGS[key]} COLUMN" for key in missing if key in _FLAGS]
    others = [name for name, formats in FORMATS.items() if any(all(key in row for key in each) for each in formats)]
    hint = f", or give it to coati-rl {others[0]}" if others else ""
    remedy = f"; name it with {' '.join(flags)}" if flags else ""
    return (
        f"has {_listed(row)}, which is no row of coati-rl {job}; the nearest format is {_listed(nearest)}, and "
        f"{_listed(missing)} is missing{remedy}{hint} (docs/data_formats.md)"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns"
