"""Files -> prompts. What `datasets` loads (JSONL, JSON, CSV, Parquet, Arrow), validated row by row, then rendered
with the model's chat template and tokenised once: from here on only token ids travel.

A row is {"messages": {"role", "content"} or a list of them, "gt_answer": text or number}.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.types import Prompt

logger = logging.getLogger(__name__)

_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The usable prompts of a file, and how many were refused for their length."""

    prompts: tuple[Prompt, ...]
    num_refused: int


def load_rows(path: str, *, flag: str) -> list[dict[str, Any]]:
    """Read and validate all rows of a file.

    Args:
        path: the file; its ending names the format.
        flag: the command-line flag it came from, for messages.
    Raises: ConfigError naming file and row (for JSONL: line) and what is wrong with it.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{flag} {path}: no such file; give a JSONL, JSON, CSV, Parquet or Arrow file")
    if file.suffix not in _LOADERS:
        raise ConfigError(f"{flag} {path}: unknown format {file.suffix!r}; use one of {', '.join(_LOADERS)}")
    rows = list(_read_jsonl(file, flag) if file.suffix == ".jsonl" else _read_with_datasets(file, flag))
    if not rows:
        raise ConfigError(f"{flag} {path}: holds no rows")
    for number, row in rows:
        _check_row(row, f"{flag} {path}, {'line' if file.suffix == '.jsonl' else 'row'} {number}")
    return [row for _, row in rows]


def _read_jsonl(file: Path, flag: str) -> Iterator[tuple[int, Any]]:
    # Line by line ourselves: the loader of `datasets` names no line, and a typo in line 7000 must be found.
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(
                        f"{flag} {file}, line {number}: not JSON: {error.msg}: {line.strip()[:80]}"
                    ) from error


def _read_with_datasets(file: Path, flag: str) -> Iterator[tuple[int, Any]]:
    import tempfile

    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="coati-datasets-") as cache:
        try:
            table = datasets.load_dataset(_LOADERS[file.suffix], data_files=str(file), split="train", cache_dir=cache)
            rows = table.to_list()
        except (datasets.exceptions.DatasetGenerationError, ValueError, TypeError, OSError) as error:
            cause = " ".join(str(error.__cause__ or error).split())
            raise ConfigError(f"{flag} {file}: cannot be read as {_LOADERS[file.suffix]}: {cause[:200]}") from error
    yield from enumerate(rows, 1)


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is {type(row).__name__}; write an object with messages and gt_answer")
    for key in ("messages", "gt_answer"):
        if row.get(key) in (None, "", [], {}):
            raise ConfigError(f"{where}: has no {key}; every row needs messages and gt_answer")
    if not isinstance(row["gt_answer"], str | int | float) or isinstance(row["gt_answer"], bool):
        raise ConfigError(f"{where}: gt_answer is {type(row['gt_answer']).__name__}; write text or a number")
    for message in messages_of(row, where):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ConfigError(f'{where}: a message is not {{"role": ..., "content": text}}')


def messages_of(row: dict[str, Any], where: str = "row") -> list[dict[str, str]]:
    """The chat messages of a row: one object, a list, or (from CSV) JSON text or the user's plain text."""
    messages = row["messages"]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError:
            messages = {"role": "user", "content": messages}
    if not isinstance(messages, dict | list):
        raise ConfigError(f"{where}: messages is {type(messages).__name__}; write an object or a list of objects")
    return [messages] if isinstance(messages, dict) else list(messages)


def make_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, *, system_prompt: str, max_prompt_tokens: int, task: str = "train"
) -> PromptSet:
    """Render and tokenise rows; uids are `<task>-<row>`.

    Args:
        rows: validated rows of `load_rows`.
        tokenizer: a transformers tokenizer with a chat template.
        system_prompt: put first, unless empty or the row brings its own.
        max_prompt_tokens: longer prompts are left out and counted.
        task: "train", or an evaluation task's name.
    """
    conversations = []
    for row in rows:
        messages = messages_of(row)
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        conversations.append(messages)
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in conversations]
    # The template has written the special tokens already; a second BOS would be a token the model never saw.
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts = tuple(
        Prompt(
            uid=f"{task}-{index}",
            token_ids=tuple(tokens),
            ground_truth=str(row["gt_answer"]),
            purpose="train" if task == "train" else "eval",
            task=task,
            text=messages[-1]["content"],
        )
        for index, (row, messages, tokens) in enumerate(zip(rows, conversations, ids, strict=True))
        if len(tokens) <= max_prompt_tokens
    )
    refused = len(rows) - len(prompts)
    if refused:
        logger.warning("%s: %d of %d prompts exceed %d tokens: refused", task, refused, len(rows), max_prompt_tokens)
    return PromptSet(prompts=prompts, num_refused=refused)
