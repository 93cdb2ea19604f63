"""The arithmetic that binds the settings to each other, checked before anything starts.

Each refusal names the rule and the numbers; sizes that do not fit end in the nearest flags that do, which pass all
rules together. P producers, T trainers, ibs/imbs prompts per
rollout step and in flight, tbs/tMbs prompts per optimizer step and mini-batch and dp group, tmbs samples per
micro-batch, g samples per prompt, dp = T / (tp * pp * cp).
"""

import math
from collections.abc import Collection, Iterator

from coati_rl.config.algorithm_rules import algorithm_problems, needs_group
from coati_rl.config.config import Config
from coati_rl.config.conflicts import conflict_problems
from coati_rl.config.control_rules import control_problems
from coati_rl.config.distillation_rules import distillation_problems
from coati_rl.config.engine_rules import engine_problems
from coati_rl.config.evaluation_rules import evaluation_problems
from coati_rl.config.reward_rules import reward_problems, service_problems
from coati_rl.config.source_rules import source_problems
from coati_rl.config.trainer_rules import trainer_problems
from coati_rl.errors import ConfigError
from coati_rl.types import DEFAULT_TASK

_FLAGS = {
    "num_trainers": "-t",
    "num_generations": "-g",
    "inference_batch_size": "-ibs",
    "inference_microbatch_size": "-imbs",
    "train_batch_size": "-tbs",
    "train_minibatch_size": "-tMbs",
    "train_microbatch_size": "-tmbs",
}


def check(config: Config) -> None:
    """Refuse a combination that cannot run. Raises: ConfigError with all broken rules, one a line."""
    problems = [
        problem
        for problems_of in (
            *(reward_problems, algorithm_problems, trainer_problems, _sizes, _budget, service_problems, _lengths),
            *(distillation_problems, control_problems, evaluation_problems, source_problems),
            *(engine_problems, _unknown_tasks),
        )
        for problem in problems_of(config)
    ]
    problems += _of_tasks(config, known=problems)
    if problems:
        raise ConfigError("\n".join(problems))


def _of_tasks(config: Config, *, known: Collection[str]) -> Iterator[str]:
    """Check the settings of each task; problems of the run's own settings are not repeated."""
    for name, task in (config.data.tasks or {}).items():
        of_task = config.of_task(name)
        for problem in (*reward_problems(of_task), *algorithm_problems(of_task), *conflict_problems(of_task)):
            if problem not in known:
                yield f"--tasks {name}: {problem}"
        limit = config.sampling.max_new_tokens
        if of_task.sampling.max_new_tokens > limit:
            yield (
                f"--tasks {name}: max_new_tokens {task.max_new_tokens} exceeds -mnt {limit}, by which engines and "
                f"trainers are sized; use -mnt {task.max_new_tokens}"
            )


def _unknown_tasks(config: Config) -> Iterator[str]:
    tasks, dataset = config.data.tasks, config.data.dataset
    known = (DEFAULT_TASK, *(tasks or {}))
    if tasks is not None and isinstance(dataset, dict):
        for name, path in dataset.items():
            if name not in known:
                yield f"--dataset {name}={path}: no such task; use one of {', '.join(known)}, or define it (--tasks)"


def _sizes(config: Config) -> Iterator[str]:
    problems = [*_broken_sizes(config)]
    if problems:
        yield from problems
        yield f"nearest valid flags: {' or '.join(nearest_flags(config))}"


def _broken_sizes(config: Config) -> Iterator[str]:
    sampling, parallel = config.sampling, config.parallel
    if sampling.num_generations < 2 and needs_group(config):
        yield f"-g 1: {config.algorithm.algo} compares the samples of a prompt and learns nothing from one"
    samples = parallel.train_minibatch_size * sampling.num_generations
    if samples < parallel.train_microbatch_size:
        yield (
            f"tMbs * g must be at least tmbs: {parallel.train_minibatch_size} * {sampling.num_generations} = {samples} "
            f"samples do not fill a micro-batch of {parallel.train_microbatch_size}"
        )
    yield from _divides(config, "inference_batch_size", "inference_microbatch_size")
    yield from _divides(config, "train_batch_size", "train_minibatch_size")
    yield from _max_producers(config)
    split = parallel.ranks_per_group
    if parallel.num_trainers % split:
        yield f"T % ({parallel.group_formula}) must be 0: -t {parallel.num_trainers} is no multiple of {split}"
    elif config.prompts_per_rollout % config.prompts_per_step:
        yield (
            f"(P * ibs) % (tbs * dp) must be 0: {parallel.num_inferencer} * {parallel.inference_batch_size} = "
            f"{config.prompts_per_rollout} prompts per rollout step are no multiple of {parallel.train_batch_size} * "
            f"{config.dp} = {config.prompts_per_step} per optimizer step"
        )


def _max_producers(config: Config) -> Iterator[str]:
    most, engines = config.parallel.max_producers, config.parallel.num_inferencer
    if most is None:
        return
    if most < engines:
        yield f"--max-producers {most}: fewer than the engines that the run begins with; use -i {most} or raise it"


def _divides(config: Config, large: str, small: str) -> Iterator[str]:
    sizes = config.flat()
    whole, part = sizes[large], sizes[small]
    large_flag, small_flag = _FLAGS[large], _FLAGS[small]
    if whole % part:
        exceeds = f"{small_flag} {part} exceeds {large_flag} {whole}"
        why = exceeds if part > whole else f"{whole} % {part} = {whole % part}"
        yield (
            f"{large_flag[1:]} % {small_flag[1:]} must be 0, and {why} "
            f"({large_flag} counts the prompts that {small_flag} cuts up)"
        )


def nearest_flags(config: Config) -> list[str]:
    """The smallest changes of sizes that pass all size rules, each as the flags to give; empty if none is needed."""
    choices = (_repaired(config, by) for by in ("train_batch_size", "inference_batch_size"))
    return list(dict.fromkeys(flags for choice in choices if choice and (flags := _changes(config, choice))))


def _repaired(config: Config, by: str) -> dict[str, int] | None:
    """Sizes that fit, where rollout and optimizer step are brought together by `by`; None if that cannot do it."""
    parallel = config.parallel
    flat = config.flat()
    sizes = {name: int(flat[name]) for name in _FLAGS}
    split = parallel.ranks_per_group
    sizes["num_trainers"] = _nearest_multiple(split, sizes["num_trainers"])
    dp, producers = sizes["num_trainers"] // split, parallel.num_inferencer
    if producers * sizes["inference_batch_size"] % (sizes["train_batch_size"] * dp):
        if by == "inference_batch_size":
            step = sizes["train_batch_size"] * dp
            sizes[by] = _nearest_multiple(step // math.gcd(step, producers), sizes[by])
        elif producers * sizes["inference_batch_size"] % dp:
            return None
        else:
            sizes[by] = nearest_divisor(producers * sizes["inference_batch_size"] // dp, sizes[by])
    for large, small in (
        ("inference_batch_size", "inference_microbatch_size"),
        ("train_batch_size", "train_minibatch_size"),
    ):
        sizes[small] = nearest_divisor(sizes[large], sizes[small])
    if needs_group(config):
        sizes["num_generations"] = max(2, sizes["num_generations"])
    samples = sizes["train_minibatch_size"] * sizes["num_generations"]
    sizes["train_microbatch_size"] = min(samples, sizes["train_microbatch_size"])
    return sizes


def _changes(config: Config, sizes: dict[str, int]) -> str:
    given = config.flat()
    return " ".join(f"{_FLAGS[name]} {size}" for name, size in sizes.items() if size != given[name])


def _nearest_multiple(of: int, start: int) -> int:
    """The positive multiple of `of` closest to `start`, the larger one of two."""
    return max(1, (2 * start + of) // (2 * of)) * of


def nearest_divisor(whole: int, start: int) -> int:
    """The divisor of `whole` closest to `start`, the larger one of two."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return min([*small, *(whole // n for n in small)], key=lambda n: (abs(n - start), -n))


def _budget(config: Config) -> Iterator[str]:
    """Check that the longest sample fits the token budget."""
    budget = config.parallel.max_tokens_per_microbatch
    if budget is not None and budget < config.max_model_len:
        yield (
            f"--max-tokens-per-microbatch {budget}: a single sample may have {named_length(config)} tokens; "
            f"use --max-tokens-per-microbatch {config.max_model_len} or {shorter(config, budget)}"
        )


def named_length(config: Config) -> str:
    """The tokens of the longest episode, by the flags that set them."""
    prompt, sampling = config.data.max_prompt_tokens, config.sampling
    if config.max_model_len == sampling.max_episode_tokens:
        return f"--max-episode-tokens {sampling.max_episode_tokens}"
    return f"-mpt {prompt} + -mnt {sampling.max_new_tokens} = {config.max_model_len}"


def shorter(config: Config, limit: int) -> str:
    """Episodes within a limit, as the flags to give."""
    prompt, sampling = config.data.max_prompt_tokens, config.sampling
    if config.max_model_len == sampling.max_episode_tokens:
        return f"--max-episode-tokens {limit}{f' -mpt {limit // 2}' if limit <= prompt else ''}"
    if prompt < limit:
        return f"-mnt {limit - prompt}"
    return f"-mpt {limit // 2} -mnt {min(sampling.max_new_tokens, limit - limit // 2)}"


def _lengths(config: Config) -> Iterator[str]:
    episode, prompt = config.sampling.max_episode_tokens, config.data.max_prompt_tokens
    if episode is not None and episode <= prompt:
        yield (
            f"--max-episode-tokens {episode}: leaves no token to be sampled after a prompt of -mpt {prompt}; "
            f"use --max-episode-tokens {prompt + config.sampling.max_new_tokens}, which is mpt + mnt, or a smaller -mpt"
        )
