"""Read a run's files of prompts, find the task of each row, and make the prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coati_rl.config import Config
from coati_rl.config.named_paths import read_sources
from coati_rl.data.dataset import PromptSet, load_rows, make_prompts
from coati_rl.data.ground_truth import required_truth
from coati_rl.data.tasks import RowTasks, Task, TaskRow
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import NO_COLUMNS, Columns

_TRAIN = "train"  # the name of training rows whose file has none


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRows:
    """Hold the rows of a run's files."""

    train: Mapping[str, Sequence[TaskRow]]  # by the name that the uids of their prompts begin with
    evaluation: Mapping[str, Sequence[TaskRow]]  # by the evaluation set's name

    @property
    def num_train(self) -> int:
        """Return the number of training rows."""
        return sum(len(rows) for rows in self.train.values())

    @property
    def tasks(self) -> set[str]:
        """Return the tasks that have a row."""
        return {row.task.name for rows in (*self.train.values(), *self.evaluation.values()) for row in rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFacts:
    """Hold what is needed of the rewards, which this package does not import; both take the text of `-rt`."""

    default_system_prompt: Callable[[str], str]  # where neither task nor run sets one
    needs_ground_truth: Callable[[str], bool]  # a function of the user's takes a ground truth
    columns_of: Callable[[str], Columns] = lambda _: NO_COLUMNS  # of a row that functions of the user's read


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFacts:
    """Hold what is needed of the environment, which this package does not import."""

    tools: tuple[dict[str, Any], ...] = ()  # schemas in OpenAI's form, which chat templates write into prompts
    check_tokenizer: Callable[[Any], None] = lambda _: None  # raises ConfigError if its chat template lacks something


def load_run_rows(config: Config, rewards: RewardFacts) -> RunRows:
    """Read and validate the rows of all files.

    Args:
        config: checked by `rules.check`.
        rewards: of the project or of a test.
    Raises: ConfigError for a file or a row that is wrong, a row's unknown task, or a task without rows.
    """
    tasks = {name: _task(name, settings, rewards) for name, settings in config.by_task.items()}
    is_defined = config.data.tasks is not None

    def of_file(name: str, *, needs_name: bool) -> RowTasks:
        if name in tasks:
            return RowTasks(tasks=tasks, of_file=name, reads_column=is_defined)
        if is_defined:
            return RowTasks(tasks=tasks, of_file=None, reads_column=True, needs_name=needs_name)
        return RowTasks(tasks=tasks)

    train = {}
    for task, sources in config.data.sources.items():
        row_tasks = of_file(task, needs_name=bool(task))
        for number, source in enumerate(sources):
            name = (task or _TRAIN) + (f":{number}" if number else "")
            train[name] = load_rows(source.path, flag="--dataset", tasks=row_tasks, max_rows=config.data.max_samples)
    evaluation = {
        name: [
            row
            for source in read_sources(text)
            for row in load_rows(source.path, flag="--eval-dataset", tasks=of_file(name, needs_name=True))
        ]
        for name, text in (config.data.eval_dataset or {}).items()
    }
    rows = RunRows(train=train, evaluation=evaluation)
    without_rows = [name for name in config.data.tasks or {} if name not in rows.tasks]
    if without_rows:
        name = without_rows[0]
        raise ConfigError(
            f"--tasks {name}: no row is of this task; give its file with -d {name}=PATH, rows with "
            f'"task": "{name}", or leave the task out'
        )
    return rows


def make_run_prompts(
    rows: RunRows, config: Config, tokenizer: Any, *, tools: Sequence[dict[str, Any]] = ()
) -> tuple[PromptSet, dict[str, PromptSet]]:
    """Return the training prompts, which tell of these tools, and those of each evaluation set.

    Raises: ConfigError if the chat template refuses a row.
    """
    make = partial(
        make_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        input_template=config.data.input_template,
        tools=tools,
    )
    sets = [make(each, name=name) for name, each in rows.train.items()]
    if config.data.shares and (unusable := [n for n, each in enumerate(sets) if not each.prompts]):
        source = [source for sources in config.data.sources.values() for source in sources][unusable[0]]
        raise ConfigError(
            f"--dataset {source.path}: all its prompts exceed --max-prompt-tokens {config.data.max_prompt_tokens}, so "
            "that it cannot have a share; raise it, or leave the source out"
        )
    train = PromptSet(
        prompts=tuple(prompt for each in sets for prompt in each.prompts),
        num_refused=sum(each.num_refused for each in sets),
    )
    evaluation = {name: make(each, name=name, purpose="eval") for name, each in rows.evaluation.items()}
    return train, evaluation


def _task(name: str, settings: Config, rewards: RewardFacts) -> Task:
    reward_type = settings.reward.reward_type
    return Task(
        name=name,
        truth=required_truth(reward_type, needs_truth=rewards.needs_ground_truth(reward_type)),
        prompt_key=settings.data.prompt_key,
        answer_key=settings.data.answer_key,
        system_prompt=_system_prompt(settings, rewards),
        columns=rewards.columns_of(reward_type) | Columns(are_kept=settings.environment.is_given),
    )


def _system_prompt(settings: Config, rewards: RewardFacts) -> str:
    if settings.data.input_template is not None:
        return ""  # the text of --input-template holds all that the model is told
    own = settings.data.system_prompt
    return rewards.default_system_prompt(settings.reward.reward_type) if own is None else own
