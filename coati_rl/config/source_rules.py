"""Check where prompts come from: generators need a bound, shares beside other sources, and a reward that fits."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.named_paths import read_sources
from coati_rl.config.reward import RewardConfig
from coati_rl.errors import ConfigError
from coati_rl.generator_spec import GENERATED, parse_generator
from coati_rl.reward_spec import NO_REWARD, parse_reward_type


def source_problems(config: Config) -> Iterator[str]:
    """Why the rows of generators cannot be drawn or scored like this, each with a remedy."""
    data = config.data
    if data.is_endless:
        yield from _endless(config)
        if data.streaming:
            yield "--streaming: generated rows are made when they are drawn in any case; leave it out beside them"
    if data.generated_tasks:
        yield from generated_reward_problems(config)


def _endless(config: Config) -> Iterator[str]:
    data = config.data
    sources = [source for sources in data.sources.values() for source in sources]
    generator = next(source.path for source in sources if source.is_generator)
    if data.max_steps is None:
        yield f"--dataset {generator}: makes rows without end; bound the run with --max-steps N"
    if data.num_episodes != 1:
        yield (
            f"--num-episodes {data.num_episodes}: rows of {generator} have no end, so that there are no passes over "
            "them; leave it out, and bound the run with --max-steps"
        )
    if len(sources) > 1 and not data.shares:
        yield (
            f"--dataset {data.dataset_text}: {generator} makes rows without end, so that the other sources would never "
            "be drawn; give each a share, SOURCE=SHARE"
        )
    if data.max_samples is not None and all(source.is_generator for source in sources):
        yield f"--max-samples {data.max_samples}: limits the rows of files, and there is none; use --max-steps"
    for source in sources:
        if source.is_generator and parse_generator(source.path).size is not None:
            yield (
                f"--dataset {source.path}: size is the number of rows of an evaluation set; leave it out, and bound "
                "the run with --max-steps"
            )


def generated_reward_problems(config: Config) -> Iterator[str]:
    """Why generated rows, of which there are some, cannot be scored like this, each with a remedy."""
    for name in config.data.generated_tasks:
        try:
            names = [part.name for part in parse_reward_type(config.of_task(name).reward.reward_type)]
        except ConfigError:
            continue  # reported with the other rewards
        if "code" in names:
            yield f"--tasks {name}: reward_type code needs test_cases, which generated rows do not have; leave it out"
    given = config.reward.reward_type
    usual = (RewardConfig.model_fields["reward_type"].default, GENERATED, NO_REWARD)
    if given not in usual and not _has_other_rows(config):
        task = config.data.generated_tasks[0]
        yield (
            f"--reward-type {given}: all rows are generated, and scored by the verifiers of their generators; leave it "
            f"""out, or set it for their task: --tasks '{{"{task}": {{"reward_type": "{given}"}}}}'"""
        )


def _has_other_rows(config: Config) -> bool:
    """Return True if a source is no generator."""
    held_out = [source for text in (config.data.eval_dataset or {}).values() for source in read_sources(text)]
    return any(not source.is_generator for sources in (*config.data.sources.values(), held_out) for source in sources)
