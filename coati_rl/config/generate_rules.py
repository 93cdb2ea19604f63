"""Check the settings of batch inference together, before anything starts."""

from collections.abc import Iterator

from coati_rl.config.conflicts import conflict_problems
from coati_rl.config.engine_rules import engine_problems
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.needs import need_problems
from coati_rl.config.reward_rules import reward_problems, service_problems
from coati_rl.config.source_rules import generated_reward_problems
from coati_rl.errors import ConfigError
from coati_rl.generator_spec import parse_generator
from coati_rl.reward_spec import NO_REWARD


def check_generate(config: GenerateConfig) -> None:
    """Refuse what cannot be carried out. Raises: ConfigError with all problems, one a line."""
    problems = [*need_problems(config), *_output(config), *_data(config), *conflict_problems(config), *_rewards(config)]
    run = config.as_run()
    problems += engine_problems(run)
    for name in config.data.tasks or {}:
        problems += [f"--tasks {name}: {each}" for each in conflict_problems(run.of_task(name)) if each not in problems]
    if problems:
        raise ConfigError("\n".join(problems))


def _output(config: GenerateConfig) -> Iterator[str]:
    output, group_size = config.output, config.sampling.num_generations
    if output.output is None:
        yield "--output: where are the JSON lines written? give -o FILE.jsonl"
    if group_size < 2 and (output.best_of or output.pairs):
        yield f"{'--pairs' if output.pairs else '--best-of'}: compares the samples of a prompt; give -g 2 or more"
    template = output.reward_template
    if template is not None and ("{input}" not in template or "{reward}" not in template):
        yield f"--reward-template {template!r}: must contain {{input}} and {{reward}}, as '{{input}} [{{reward}}]' does"


def _data(config: GenerateConfig) -> Iterator[str]:
    if config.data.shares:
        yield (
            f"--dataset {config.data.dataset_text}: shares mix the prompts of a training run, and here each prompt is "
            "sampled once; leave the shares out"
        )
    for source in (source for sources in config.data.sources.values() for source in sources):
        if source.is_generator and parse_generator(source.path).size is None:
            mark = "&" if "?" in source.path else "?"
            yield f"--dataset {source.path}: makes rows without end; say how many, {source.path}{mark}size=100"


def _rewards(config: GenerateConfig) -> Iterator[str]:
    yield from _of_training(config)
    if config.reward.reward_devices != 1:
        yield (
            f"--reward-devices {config.reward.reward_devices}: reward models of batch inference are loaded in its own "
            "process, on its device; leave it out"
        )
    tasks = config.data.tasks or {}
    scored = [name for name, task in tasks.items() if "reward_type" in task.given]
    if not config.is_scored:
        if scored:
            yield f"--tasks {scored[0]}: has a reward_type, and other rows have none; give --reward-type for them"
        return
    run = config.as_run()
    problems = [*reward_problems(run), *service_problems(run)]
    if run.data.generated_tasks:
        problems += generated_reward_problems(run)
    yield from problems
    for name in tasks:
        if tasks[name].given.get("reward_type") == NO_REWARD:
            yield f"--tasks {name}: reward_type {NO_REWARD}: score all rows, or none"
        else:
            yield from (
                f"--tasks {name}: {each}" for each in reward_problems(run.of_task(name)) if each not in problems
            )


def _of_training(config: GenerateConfig) -> Iterator[str]:
    reward = config.reward
    given = {"--reward-normalize": reward.reward_normalize, "--reward-clip": reward.reward_clip is not None}
    flags = [flag for flag, is_given in given.items() if is_given]
    if flags:
        yield (
            f"{', '.join(flags)}: changes the rewards of a mini-batch in training, and here rewards are written as "
            f"they are; leave {'it' if len(flags) == 1 else 'them'} out"
        )
