"""Read a run's files of prompts, find the task of each row, and make the prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coati_rl.config import Config
from coati_rl.config.named_paths import read_sources
from coati_rl.errors import ConfigError, RunError
from coati_rl.generator_spec import DEFAULT_SIZE, GENERATED, is_generator, parse_generator
from coati_rl.reading.dataset import PromptSet, checked_row, load_rows, make_prompts
from coati_rl.reading.endless_prompts import EndlessPrompts, GeneratedPrompts
from coati_rl.reading.generators import Generator, open_generator
from coati_rl.reading.ground_truth import required_truth
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.reading.streamed_prompts import StreamedPrompts, streamed_task_rows
from coati_rl.reading.streamed_rows import StreamedRows
from coati_rl.reading.tasks import RowTasks, Task, TaskRow
from coati_rl.reward_spec import NO_COLUMNS, RewardColumns
from coati_rl.types import Prompt

_TRAIN = "train"  # the name of training rows whose file has none


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedRows:
    """Hold a generator of training rows, of which there is always another one, and their task."""

    generator: Generator
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRows:
    """Hold the rows of a run's files."""

    train: Mapping[str, Sequence[TaskRow] | GeneratedRows]  # by the name that the uids of their prompts begin with
    evaluation: Mapping[str, Sequence[TaskRow]]  # by the evaluation set's name

    @property
    def of_files(self) -> dict[str, Sequence[TaskRow]]:
        """Return the training rows whose number is known, by the same names."""
        return {name: rows for name, rows in self.train.items() if not isinstance(rows, GeneratedRows)}

    @property
    def generated(self) -> dict[str, GeneratedRows]:
        """Return the generators of training rows, by the same names."""
        return {name: rows for name, rows in self.train.items() if isinstance(rows, GeneratedRows)}

    @property
    def num_train(self) -> int | None:
        """Return the number of training rows; None: endless."""
        return None if self.generated else sum(len(rows) for rows in self.of_files.values())

    @property
    def tasks(self) -> set[str]:
        """Return the tasks that have a row."""
        known = {rows.task.name for rows in self.generated.values()}
        for rows in (*self.of_files.values(), *self.evaluation.values()):
            known |= rows.kinds if isinstance(rows, StreamedRows) else {row.task.name for row in rows}
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFacts:
    """Hold what is needed of the rewards, which this package does not import; both take the text of `-rt`."""

    default_system_prompt: Callable[[str], str]  # where neither task nor run sets one
    needs_ground_truth: Callable[[str], bool]  # a function of the user's takes a ground truth
    columns_of: Callable[[str], RewardColumns] = lambda _: NO_COLUMNS  # of a row that functions of the user's read


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFacts:
    """Hold what is needed of the environment, which this package does not import."""

    tools: tuple[dict[str, Any], ...] = ()  # schemas in OpenAI's form, which chat templates write into prompts
    check_tokenizer: Callable[[Any], None] = lambda _: None  # raises ConfigError if its chat template lacks something


def load_run_rows(config: Config, rewards: RewardFacts, *, tools: tuple[dict[str, Any], ...] = ()) -> RunRows:
    """Read and validate the rows of all files.

    Args:
        config: checked by `rules.check`.
        rewards: of the project or of a test.
        tools: schemas that prompts tell of.
    Raises: ConfigError for a file or a row that is wrong, a row's unknown task, or a task without rows.
    """
    tasks = {name: replace(_task(name, settings, rewards), tools=tools) for name, settings in config.by_task.items()}
    is_defined = config.data.tasks is not None

    def of_file(name: str, *, needs_name: bool) -> RowTasks:
        if name in tasks:
            return RowTasks(tasks=tasks, of_file=name, reads_column=is_defined)
        if is_defined:
            return RowTasks(tasks=tasks, of_file=None, reads_column=True, needs_name=needs_name)
        return RowTasks(tasks=tasks)

    train: dict[str, Sequence[TaskRow] | GeneratedRows] = {}
    for task, sources in config.data.sources.items():
        row_tasks = of_file(task, needs_name=bool(task))
        for number, source in enumerate(sources):
            name = (task or _TRAIN) + (f":{number}" if number else "")
            if source.is_generator:
                of_rows = tasks[task or GENERATED]
                train[name] = _generated(source.path, of_rows, flag="--dataset", seed=config.run.seed)
            else:
                load = streamed_task_rows if config.data.streaming else load_rows
                limit = config.data.max_samples
                train[name] = load(source.path, flag="--dataset", tasks=row_tasks, max_rows=limit)

    def held_out(name: str, path: str) -> Sequence[TaskRow]:
        if not is_generator(path):
            return load_rows(path, flag="--eval-dataset", tasks=of_file(name, needs_name=True))
        task = tasks[config.data.task_of_generated(name)]
        rows = _generated(path, task, flag="--eval-dataset", seed=None)
        return _first_rows(rows, DEFAULT_SIZE) if isinstance(rows, GeneratedRows) else rows

    evaluation = {
        name: [row for source in read_sources(text) for row in held_out(name, source.path)]
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


def _generated(path: str, task: Task, *, flag: str, seed: int | None) -> GeneratedRows | Sequence[TaskRow]:
    """Return a generator, or as many of its rows as it names. Raises: ConfigError."""
    spec, where = parse_generator(path), f"{flag} {path}"
    task = replace(task, prompt_key=None, answer_key=None)  # which name the columns of files
    rows = GeneratedRows(generator=open_generator(spec, seed=seed, where=where), task=task)
    _first_rows(rows, 1)
    return rows if spec.size is None else _first_rows(rows, spec.size)


def _first_rows(rows: GeneratedRows, size: int) -> Sequence[TaskRow]:
    """Return rows of a generator, checked as those of a file are. Raises: ConfigError."""
    tasks = RowTasks(tasks={rows.task.name: rows.task}, of_file=rows.task.name)
    path, found = f"reasoning_gym:{rows.generator.spec.name}", list[TaskRow]()
    for number in range(size):
        try:
            fields = rows.generator.row(number)
        except Exception as error:
            raise ConfigError(f"{path}, row {number}: cannot be made: {type(error).__name__}: {error}") from error
        found.append(checked_row(fields, tasks, f"{path}, row {number}"))
    return found


def make_source(rows: RunRows, config: Config, tokenizer: Any, train: PromptSet) -> DatasetPrompts | EndlessPrompts:
    """Return the source of a run's prompts, of which those of files are made.

    Raises: ConfigError if no row of a generator can be used.
    """
    data, seed = config.data, config.run.seed
    if not rows.generated:
        return DatasetPrompts(train.prompts, num_episodes=data.num_episodes, seed=seed, shares=data.shares)
    parts: dict[str, Sequence[Prompt] | GeneratedPrompts] = {}
    for name, each in rows.train.items():
        if isinstance(each, GeneratedRows):
            generated = GeneratedPrompts(
                name=name,
                generator=each.generator,
                task=each.task,
                tokenizer=tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                input_template=data.input_template,
            )
            try:
                generated.prompt(0)
            except RunError as error:
                raise ConfigError(f"--dataset {error}") from error
            parts[name] = generated
        else:
            parts[name] = [prompt for prompt in train.prompts if prompt.uid.rpartition("-")[0] == name]
    return EndlessPrompts(parts, seed=seed, shares=data.shares)


def make_run_prompts(rows: RunRows, config: Config, tokenizer: Any) -> tuple[PromptSet, dict[str, PromptSet]]:
    """Return the training prompts of files and the prompts of each evaluation set.

    Raises: ConfigError if the chat template refuses a row.
    """
    make = partial(
        make_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        input_template=config.data.input_template,
    )
    streamed = {name: each for name, each in rows.of_files.items() if isinstance(each, StreamedRows)}
    if streamed:
        prompts = StreamedPrompts(
            streamed,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            input_template=config.data.input_template,
            shares=config.data.shares,
        )
        sizes, train = prompts.sizes, PromptSet(prompts=prompts, num_refused=prompts.num_unusable)
    else:
        sets = [make(each, name=name) for name, each in rows.of_files.items()]
        sizes = tuple(len(each.prompts) for each in sets)
        train = PromptSet(
            prompts=tuple(prompt for each in sets for prompt in each.prompts),
            num_refused=sum(each.num_refused for each in sets),
        )
    if config.data.shares and (unusable := [n for n, size in enumerate(sizes) if not size]):
        of_files = [each for sources in config.data.sources.values() for each in sources if not each.is_generator]
        source = of_files[unusable[0]]
        raise ConfigError(
            f"--dataset {source.path}: all its prompts exceed --max-prompt-tokens {config.data.max_prompt_tokens}, so "
            "that it cannot have a share; raise it, or leave the source out"
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
        columns=rewards.columns_of(reward_type) | RewardColumns(are_kept=settings.environment.is_given),
        takes_template_options=not settings.environment.is_given,
    )


def _system_prompt(settings: Config, rewards: RewardFacts) -> str:
    if settings.data.input_template is not None:
        return ""  # the text of --input-template holds all that the model is told
    own = settings.data.system_prompt
    return rewards.default_system_prompt(settings.reward.reward_type) if own is None else own
