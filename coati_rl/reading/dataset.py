"""Read the rows of prompts, validate each, render and tokenise it once.

A row is {"messages": {"role", "content"} or a list of them, "gt_answer": text or number}; `prompt`, `conversations` or
a column that is named may stand in the place of messages, and text in that of the user's message. Which other columns
may hold the answer, and what takes its place, is in `coati_rl.reading.ground_truth`; which task a row belongs to, in
`coati_rl.reading.tasks`.

A conversation that ends with a turn of the assistant's is refused: rows of supervised fine-tuning end with the
solution, which the policy would read before it answers. It may also be meant as the beginning of the answer, so that
leaving it out would be wrong, too.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.chat_template import apply_chat_template, check_options
from coati_rl.reading.conversations import leading_ids
from coati_rl.reading.files import read_rows
from coati_rl.reading.ground_truth import ground_truth
from coati_rl.reading.json_text import json_of_text
from coati_rl.reading.row_messages import conversation_of, is_missing, plain_messages, template_options_of
from coati_rl.reading.tasks import ONE_TASK, RowTasks, Task, TaskRow
from coati_rl.types import DEFAULT_TASK, Prompt, Purpose

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Hold the usable prompts of a file, and the number refused for their length."""

    prompts: Sequence[Prompt]
    num_refused: int


def load_rows(source: str, *, flag: str, tasks: RowTasks = ONE_TASK, max_rows: int | None = None) -> list[TaskRow]:
    """Read and validate rows.

    Args:
        source: a file, a directory or a dataset of the hub, as of `files.read_rows`.
        flag: the command-line flag it came from, for messages.
        tasks: of the rows, which say what every row must have besides messages.
        max_rows: read no more than the first of them; None: all.
    Raises: ConfigError naming file and row (for JSONL: line) and what is wrong with it.
    """
    rows = read_rows(source, flag=flag, max_rows=max_rows)
    return [checked_row(row, tasks, where) for where, row in rows]


def checked_row(row: Any, tasks: RowTasks, where: str) -> TaskRow:
    """Return a row with its task; `where` names file and row. Raises: ConfigError for a row that is wrong."""
    if not isinstance(row, dict):
        needed = _needed(tasks.tasks[tasks.of_file or DEFAULT_TASK])
        raise ConfigError(f"{where}: is {type(row).__name__}; write an object with {needed}")
    task = tasks.of(row, where)
    where += "" if task.name == DEFAULT_TASK else f" (task {task.name})"
    key = _prompt_key(row, task)
    if is_missing(row.get(key)):
        raise ConfigError(
            f"{where}: has no {key}; every row needs {_needed(task)}. Its columns are {', '.join(row) or 'none'}: name "
            "the one with the prompt by --prompt-key COLUMN"
        )
    ground_truth(row, task.truth, where, answer_key=task.answer_key)
    missing = [name for name in task.columns.required if name not in row]
    if missing:
        raise ConfigError(
            f"{where}: has no column {missing[0]}, which the function of --reward-type takes; add it to the row, or "
            "give the parameter a default"
        )
    messages = messages_of(row, where, key=key)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: {key} ends with a turn of the assistant, which the policy would read before it answers; leave "
            f"that message out of the row, or name the column with the question alone by --prompt-key COLUMN (its "
            f"columns are {', '.join(row)})"
        )
    if template_options_of(row, where) and not task.takes_template_options:
        raise ConfigError(
            f"{where}: has chat_template_kwargs, which the turns of an environment or agent are not rendered with; "
            "leave the column out, and set the variables for all rows by --chat-template-kwargs"
        )
    return TaskRow(fields=row, task=task)


def _needed(task: Task) -> str:
    """Return the columns that a row of the task must have."""
    answer = "test_cases" if task.truth == "test_cases" else task.answer_key or "gt_answer"
    prompt = "messages" if task.prompt_key is None else f"{task.prompt_key} (--prompt-key)"
    return f"{prompt} and {answer}" if task.truth else prompt


def _prompt_key(row: dict[str, Any], task: Task) -> str:
    """Return the column that holds the prompt of a row."""
    if task.prompt_key is not None:
        return task.prompt_key
    held = [key for key in ("messages", "prompt") if not is_missing(row.get(key))]
    return next(iter(held), "messages" if conversation_of(row) is None else "conversations")


def messages_of(row: dict[str, Any], where: str = "row", *, key: str = "messages") -> list[dict[str, Any]]:
    """Return the chat messages of a row's column: one object, a list, JSON text of them, or the user's plain text."""
    messages = (key == "conversations" and conversation_of(row)) or row[key]
    if isinstance(messages, str):
        text = messages
        messages = json_of_text(text)
        if not messages or not isinstance(messages, dict | list):  # "12" is a prompt too
            messages = {"role": "user", "content": text}
    if not isinstance(messages, dict | list):
        raise ConfigError(f"{where}: {key} is {type(messages).__name__}; write an object or a list of objects")
    return plain_messages([messages] if isinstance(messages, dict) else messages, key, where)


def json_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row as JSON types: dates and other types that JSON lacks are text."""
    columns: dict[str, Any] = json.loads(json.dumps(dict(row), default=str))
    return columns


def make_prompts(
    rows: Sequence[TaskRow],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    name: str = "train",
    purpose: Purpose = "train",
    input_template: str | None = None,
) -> PromptSet:
    """Render and tokenise rows; uids are `<name>-<row>`.

    Args:
        rows: validated rows of `load_rows`.
        tokenizer: a transformers tokenizer with a chat template.
        max_prompt_tokens: longer prompts are left out and counted.
        name: of the rows: "train", the task whose file they are, or an evaluation set's name (it may be "train" too).
        purpose: what the prompts are for.
        input_template: in place of a chat template, text in which "{}" stands for the user's only message.
    Raises: ConfigError if the chat template refuses a row.
    """
    rendered = render_prompts(rows, tokenizer, name=name, purpose=purpose, input_template=input_template)
    prompts = tuple(prompt for prompt in rendered if len(prompt.token_ids) <= max_prompt_tokens)
    refused = len(rows) - len(prompts)
    log_refused(name, refused, len(rows), max_prompt_tokens)
    return PromptSet(prompts=prompts, num_refused=refused)


def log_refused(name: str, num_refused: int, num_rows: int, max_prompt_tokens: int) -> None:
    """Write a warning if prompts are refused for their length."""
    if num_refused:
        logger.warning("%s: %d of %d prompts exceed %d tokens: refused", name, num_refused, num_rows, max_prompt_tokens)


def render_prompts(
    rows: Sequence[TaskRow],
    tokenizer: Any,
    *,
    name: str = "train",
    purpose: Purpose = "train",
    first: int = 0,
    input_template: str | None = None,
) -> list[Prompt]:
    """Render and tokenise rows of any length, of which the first has number `first`; see `make_prompts`."""
    conversations = []
    for row in rows:
        messages = messages_of(row.fields, key=_prompt_key(row.fields, row.task))
        if row.task.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": row.task.system_prompt}, *messages]
        conversations.append(messages)
    render = _with_chat_template if input_template is None else partial(_with_text, template=input_template)
    texts = [
        render(messages, tokenizer, f"{name}, prompt {n}", row)
        for n, (row, messages) in enumerate(zip(rows, conversations, strict=True), first + 1)
    ]
    # The template has written the special tokens already; a second BOS would be a token the model never saw.
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if input_template is not None:
        ids = [[*leading_ids(text, tokenizer), *tokens] for text, tokens in zip(texts, ids, strict=True)]
    return [
        Prompt(
            uid=f"{name}-{index}",
            token_ids=tuple(tokens),
            ground_truth=ground_truth(row.fields, row.task.truth, answer_key=row.task.answer_key),
            purpose=purpose,
            task=row.task.name,
            eval_set=name if purpose == "eval" else "",
            text=messages[-1]["content"],
            messages=tuple(messages),
            rendered=text,
            columns=json_columns(row.fields) if row.task.columns.are_kept else {},
        )
        for index, (row, messages, text, tokens) in enumerate(zip(rows, conversations, texts, ids, strict=True), first)
    ]


def _with_chat_template(messages: Sequence[dict[str, Any]], tokenizer: Any, where: str, row: TaskRow) -> str:
    own = template_options_of(row.fields, where)
    check_options(tokenizer, own, where)
    options = {**own, "tools": list(row.task.tools) or None, "add_generation_prompt": True, "tokenize": False}
    return str(apply_chat_template(tokenizer, messages, where, **options))


def _with_text(messages: Sequence[dict[str, Any]], _: Any, where: str, row: TaskRow, *, template: str) -> str:
    if len(messages) > 1:
        raise ConfigError(f"{where}: has several messages, and --input-template takes the text of one; leave it out")
    return template.replace("{}", messages[0]["content"])
