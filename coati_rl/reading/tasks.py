"""Find the task of each row, which decides its ground truth and its system prompt.

A file is of one task (`-d NAME=PATH`), or its rows name theirs in the column `task`; a row that names none is of the
task "default". Where a run defines no tasks the column means nothing and is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.ground_truth import TruthKey
from coati_rl.reward_spec import NO_COLUMNS, RewardColumns
from coati_rl.types import DEFAULT_TASK

TASK_COLUMN = "task"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Define how the rows of a task become prompts."""

    name: str = DEFAULT_TASK
    truth: TruthKey | None = "gt_answer"  # what every row must have besides messages; None: nothing
    prompt_key: str | None = None  # the column with the prompt; None: messages, else prompt
    answer_key: str | None = None  # as of `ground_truth`
    system_prompt: str = ""  # put first, unless empty or the row brings its own
    columns: RewardColumns = NO_COLUMNS  # that its reward reads besides messages and ground truth
    tools: tuple[dict[str, Any], ...] = ()  # schemas that the chat template writes into its prompts
    takes_template_options: bool = True  # of a row, as nothing but the prompt is rendered


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRow:
    """Hold a row of a file and its task."""

    fields: dict[str, Any]
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTasks:
    """Find the tasks of a file's rows."""

    tasks: Mapping[str, Task]  # by name, "default" among them
    of_file: str | None = DEFAULT_TASK  # the task of all its rows; None: each row names its own
    reads_column: bool = False  # the run defines tasks
    needs_name: bool = False  # a row must name its task where the file does not

    def of(self, row: dict[str, Any], where: str) -> Task:
        """Return a row's task; `where` names file and row. Raises: ConfigError for an unknown or a wrong one."""
        named = row.get(TASK_COLUMN) if self.reads_column else None
        if self.of_file is not None:
            if isinstance(named, str) and named in self.tasks and named != self.of_file:
                raise ConfigError(
                    f"{where}: its task is {named!r}, and its file is given for {self.of_file!r}; correct one of them"
                )
            return self.tasks[self.of_file]
        if named in (None, ""):
            if self.needs_name:
                raise ConfigError(
                    f"{where}: names no task, and neither does its file; give the row a task, or the file one of the "
                    f"names {', '.join(self.tasks)}"
                )
            return self.tasks[DEFAULT_TASK]
        if not isinstance(named, str) or named not in self.tasks:
            raise ConfigError(
                f"{where}: its task {named!r} is not defined; use one of {', '.join(self.tasks)}, or define it "
                "(--tasks)"
            )
        return self.tasks[named]


ONE_TASK = RowTasks(tasks={DEFAULT_TASK: Task()})  # of a run without reward types
