"""Set the rows that are read and how text is rendered; for prompts also their tasks, and how many are drawn."""

from datetime import datetime
from fractions import Fraction
from typing import Any

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.named_paths import DataSource, check_evaluation_sets, read_sources, shares_of
from coati_rl.config.tasks import TaskConfig, check_name
from coati_rl.config.user_paths import exists
from coati_rl.generator_spec import GENERATED
from coati_rl.plugins import absolute

CHATML = "chatml"


def streaming_field() -> Any:
    """Return the field of --streaming."""
    return execution(
        False,
        "Keep only the places of training rows in memory, and read, render and tokenise each when it is drawn; for "
        "JSONL files and directories of them. Rows and order are the same.",
    )


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


class DatasetFields(Section):
    """Rows, their columns, and how text is rendered."""

    max_samples: int | None = experiment(
        None, "Read at most this many rows of each training file or dataset, the first ones.", ge=1
    )
    prompt_key: str | None = experiment(
        None,
        "Column with the prompt, messages or text (--input-key is the same); default: messages, else prompt.",
        metavar="COLUMN",
        aliases=("--input-key",),
    )
    input_template: str | None = experiment(
        None,
        "Write the prompt's text in place of {} in this text, in place of a chat template; '{}' leaves it as it is.",
    )
    chat_template: str | None = experiment(
        None,
        "Chat template (Jinja) in place of the model's, for models without one: a file, text, or chatml. Checkpoints "
        "are saved with it.",
        metavar="FILE",
    )
    chat_template_kwargs: dict[str, Any] = experiment(
        {},
        "Variables of the chat template for all conversations, a JSON object such as '{\"enable_thinking\": false}'; "
        "those of a row's column of this name win.",
    )
    template_date: str | None = experiment(
        None,
        "Date that chat templates write as today's (YYYY-MM-DD, or with Thh:mm:ss), where they write one; default: "
        "that of the run's start, which checkpoints keep.",
        metavar="DATE",
    )

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _none_is_no_variable(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("template_date")
    @classmethod
    def _is_a_date(cls, text: str | None) -> str | None:
        try:
            return text if text is None else datetime.fromisoformat(text).isoformat()
        except ValueError:
            raise ValueError("is no date; write it as 2026-01-31") from None

    @field_validator("input_template")
    @classmethod
    def _has_a_place_for_text(cls, template: str | None) -> str | None:
        if template is not None and "{}" not in template:
            raise ValueError("has no {}, in place of which the prompt's text is written")
        return template

    @field_validator("chat_template")
    @classmethod
    def _is_read(cls, template: str | None) -> str | None:
        """Return the text of a template, or the name of a known one."""
        if template is None or template == CHATML or _is_template(template):
            return template
        if not exists(template):
            raise ValueError(f"is neither a file, nor a template with {{{{ or {{%, nor {CHATML}")
        try:
            text = absolute(template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror or error}") from error
        if not _is_template(text):
            raise ValueError("holds no Jinja template: it has neither {{ nor {%")
        return text


class PromptFields(DatasetFields):
    """Prompts, their tasks and their system prompt."""

    dataset: str | dict[str, str] = experiment(
        "data.jsonl",
        "Prompts: a JSONL, JSON, CSV, Parquet or Arrow file, a directory of them, owner/name[:split] of "
        "the Hugging Face hub, or reasoning_gym:NAME?PARAMETER=VALUE, a generator. PATH,PATH for several, "
        "PATH=SHARE,PATH=SHARE to mix them. TASK=PATH, repeated, for several tasks.",
        short="-d",
        metavar="PATH",
    )
    tasks: dict[str, TaskConfig] | None = experiment(
        None, "What tasks set for their own rows (docs/tasks.md), by name; in YAML, or as a JSON object."
    )
    answer_key: str | None = experiment(
        None,
        "Column with the answer (--label-key is the same); default: gt_answer, else answer, ground_truth or label.",
        metavar="COLUMN",
        aliases=("--label-key",),
    )
    system_prompt: str | None = experiment(None, "System message; default: the reward type's. '' for none.", short="-s")
    max_prompt_tokens: int = experiment(
        512, "Longer prompts are refused and counted, never cut (tokens, chat template included).", short="-mpt", ge=1
    )

    @field_validator("dataset", mode="before")
    @classmethod
    def _is_a_path_or_paths_by_task(cls, value: Any) -> Any:
        if isinstance(value, dict) and value and all(isinstance(part, str) for pair in value.items() for part in pair):
            for task in value:
                check_name(task)
        elif not isinstance(value, str):
            raise ValueError("is neither a path nor paths by the name of their task")
        texts = [value] if isinstance(value, str) else value.values()
        shares_of([source for text in texts for source in read_sources(text)])  # ValueError if they are wrong
        return value

    @field_validator("tasks")
    @classmethod
    def _tasks_have_names(cls, tasks: dict[str, TaskConfig] | None) -> dict[str, TaskConfig] | None:
        for name in tasks or {}:
            check_name(name)
        return tasks or None

    @property
    def sources(self) -> dict[str, tuple[DataSource, ...]]:
        """Return where the prompts come from, by the task of their flag; "" where it names none."""
        by_task = {"": self.dataset} if isinstance(self.dataset, str) else self.dataset
        return {task: read_sources(text) for task, text in by_task.items()}

    @property
    def generated_tasks(self) -> tuple[str, ...]:
        """Return the tasks of generated training rows; those whose source names none are of the task reasoning_gym."""
        return tuple(
            dict.fromkeys(
                task or GENERATED for task, sources in self.sources.items() for source in sources if source.is_generator
            )
        )

    @property
    def is_endless(self) -> bool:
        """Return True if training rows are generated, so that there is always another one."""
        return any(source.is_generator for sources in self.sources.values() for source in sources)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Return the shares by which the sources are mixed, in their order; none if every prompt is drawn once."""
        return shares_of([source for sources in self.sources.values() for source in sources])

    @property
    def dataset_text(self) -> str:
        """Return the prompts' files for messages."""
        files = self.dataset
        return files if isinstance(files, str) else " ".join(f"{task}={path}" for task, path in files.items())


class DataConfig(PromptFields):
    """Training and evaluation prompts."""

    eval_dataset: dict[str, str] | None = execution(
        None,
        'Evaluation sets as NAME=PATH, repeated, or as a JSON object, {"name": "path"}; see --eval-samples.',
        short="-ed",
        metavar="NAME=PATH",
    )
    streaming: bool = streaming_field()
    num_episodes: int = experiment(1, "Passes over the training prompts.", short="-e", ge=1)
    max_steps: int | None = experiment(None, "Stop after this many optimizer steps, if the data lasts.", ge=1)

    @property
    def generated_tasks(self) -> tuple[str, ...]:
        """Return the tasks of generated rows, those of evaluation sets among them."""
        evaluated = [
            self.task_of_generated(name)
            for name, text in (self.eval_dataset or {}).items()
            if any(source.is_generator for source in read_sources(text))
        ]
        return tuple(dict.fromkeys((*super().generated_tasks, *evaluated)))

    def task_of_generated(self, name: str) -> str:
        """Return the task of the generated rows of an evaluation set: of its name, unless that is a task of files."""
        is_only_evaluated = name in (self.tasks or {}) and name not in self.sources
        return name if name in super().generated_tasks or is_only_evaluated else GENERATED

    @field_validator("eval_dataset")
    @classmethod
    def _are_evaluation_sets(cls, sets: dict[str, str] | None) -> dict[str, str] | None:
        check_evaluation_sets(sets)
        return sets
