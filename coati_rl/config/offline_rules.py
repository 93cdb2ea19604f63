"""Check the settings of a job on a dataset."""

from collections.abc import Iterator

from coati_rl.config.evaluation_rules import evaluation_problems
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.trainer_rules import trainer_problems
from coati_rl.errors import ConfigError


def check_offline(config: OfflineConfig) -> None:
    """Refuse a combination that cannot run. Raises: ConfigError with all broken rules, one a line."""
    problems = [*_sizes(config), *_budget(config), *trainer_problems(config), *evaluation_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _sizes(config: OfflineConfig) -> Iterator[str]:
    parallel = config.parallel
    split = parallel.ranks_per_group
    if parallel.num_trainers % split:
        nearest = max(1, parallel.num_trainers // split) * split
        yield (
            f"T % ({parallel.group_formula}) must be 0: -t {parallel.num_trainers} is no multiple of {split}; "
            f"use -t {nearest}"
        )


def _budget(config: OfflineConfig) -> Iterator[str]:
    budget, longest = config.parallel.max_tokens_per_microbatch, config.UNIT * config.max_sample_tokens
    if budget is not None and budget < longest:
        row = (
            f"{config.UNIT} samples of --max-length {config.data.max_length} tokens"
            if config.UNIT > 1
            else (f"--max-length {config.data.max_length} tokens")
        )
        yield (
            f"--max-tokens-per-microbatch {budget}: a single row may have {row}; use --max-tokens-per-microbatch "
            f"{longest} or --max-length {budget // config.UNIT}"
        )
