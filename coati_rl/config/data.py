"""Set the prompts: their files, tasks and system prompt, and how many are drawn."""

from typing import Any

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.tasks import TaskConfig, check_name


class DataConfig(Section):
    """Training and evaluation prompts."""

    dataset: str | dict[str, str] = experiment(
        "data.jsonl",
        "Training prompts: JSONL, JSON, CSV, Parquet or Arrow. TASK=PATH, repeated, for files of several tasks.",
        short="-d",
        metavar="PATH",
    )
    eval_dataset: dict[str, str] | None = execution(
        None,
        'Evaluation sets as NAME=PATH, repeated, or as a JSON object, {"name": "path"}; see --eval-samples.',
        short="-ed",
        metavar="NAME=PATH",
    )
    tasks: dict[str, TaskConfig] | None = experiment(
        None, "What tasks set for their own rows (docs/tasks.md), by name; in YAML, or as a JSON object."
    )
    answer_key: str | None = experiment(
        None, "Column with the answer; default: gt_answer, else answer, ground_truth or label.", metavar="COLUMN"
    )
    num_episodes: int = experiment(1, "Passes over the training prompts.", short="-e", ge=1)
    max_steps: int | None = experiment(None, "Stop after this many optimizer steps, if the data lasts.", ge=1)
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
        return value

    @field_validator("tasks")
    @classmethod
    def _tasks_have_names(cls, tasks: dict[str, TaskConfig] | None) -> dict[str, TaskConfig] | None:
        for name in tasks or {}:
            check_name(name)
        return tasks or None

    @property
    def dataset_text(self) -> str:
        """Return the training data for messages."""
        files = self.dataset
        return files if isinstance(files, str) else " ".join(f"{task}={path}" for task, path in files.items())

    @field_validator("eval_dataset")
    @classmethod
    def _tasks_are_file_names(cls, tasks: dict[str, str] | None) -> dict[str, str] | None:
        for task in tasks or {}:
            if not task or "/" in task or task.startswith("."):
                raise ValueError(f"the task {task!r} names the result files: use letters and digits")
        return tasks
