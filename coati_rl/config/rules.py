"""The arithmetic that binds the settings to each other, checked before anything starts.

Each refusal names the rule, the numbers and the nearest valid flags. P producers, T trainers, ibs/imbs prompts per
rollout step and in flight, tbs/tMbs prompts per optimizer step and mini-batch and dp group, tmbs samples per
micro-batch, g samples per prompt, dp = T / (tp * pp).
"""

from collections.abc import Callable, Iterator

from coati_rl.config.config import Config
from coati_rl.errors import ConfigError

ALGORITHMS = ("GRPO",)
LATER_ALGORITHMS = (
    "DAPO",
    "DR_GRPO",
    "RLOO",
    "REINFORCE_PPB",
    "REINFORCE_PP",
    "REINFORCE_PP_BASELINE",
    "GSPO",
    "CISPO",
)
REWARD_TYPES = ("think_answer_tags", "boxed")


def check(config: Config) -> None:
    """Refuse a combination that cannot run. Raises: ConfigError with all broken rules, one a line."""
    problems = [*_not_available(config), *_sizes(config), *_sampling(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _not_available(config: Config) -> Iterator[str]:
    """What the command line knows but this version cannot do yet is refused, never parsed and ignored."""
    if config.algo in LATER_ALGORITHMS:
        yield f"--algo {config.algo}: not available in this version; use --algo GRPO"
    elif config.algo not in ALGORITHMS:
        yield f"--algo {config.algo!r}: unknown; use {' or '.join(ALGORITHMS)}"
    if config.reward_type == "code" or ":" in config.reward_type:
        yield f"--reward-type {config.reward_type}: not available in this version; use {' or '.join(REWARD_TYPES)}"
    elif config.reward_type not in REWARD_TYPES:
        yield f"--reward-type {config.reward_type!r}: unknown; use {' or '.join(REWARD_TYPES)}"
    if config.code_verifier_api_url is not None:
        yield "--code-verifier-api-url: code rewards are not available in this version; leave it out"
    if config.checkpoint_path is not None:
        yield "--checkpoint-path: resuming is not available in this version; start from a checkpoint with --model"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) > 1:
            value, flag = getattr(config, name), "--" + name.replace("_", "-")
            yield f"{flag} {value}: only data-parallel trainers are available in this version; use {flag} 1"
    if config.zero_stage > 0:
        yield f"--zero-stage {config.zero_stage}: not available in this version; use --zero-stage 0"


def _sizes(config: Config) -> Iterator[str]:
    split = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.num_trainers % split:
        near = _nearest(config.num_trainers, lambda t: t % split == 0)
        yield f"-t {config.num_trainers}: must be a multiple of tp * pp = {split}; nearest: -t {near}"
        return
    rollout, step = config.prompts_per_rollout, config.prompts_per_step
    if rollout % step:
        ibs = _nearest(config.inference_batch_size, lambda n: config.num_inferencer * n % step == 0)
        tbs = _nearest(config.train_batch_size, lambda n: rollout % (n * config.dp) == 0)
        yield (
            f"(num_inferencer * ibs) % (tbs * dp) must be 0: {config.num_inferencer} * {config.inference_batch_size} = "
            f"{rollout} prompts per rollout step are no multiple of {config.train_batch_size} * {config.dp} = {step} "
            f"per optimizer step; nearest: {_either(('-ibs', ibs), ('-tbs', tbs))}"
        )
    yield from _divides(config, "inference_batch_size", "-ibs", "inference_microbatch_size", "-imbs")
    yield from _divides(config, "train_batch_size", "-tbs", "train_minibatch_size", "-tMbs")
    samples = config.train_minibatch_size * config.num_generations
    if samples < config.train_microbatch_size:
        yield (
            f"tMbs * g must be at least tmbs: {config.train_minibatch_size} * {config.num_generations} = {samples} "
            f"samples do not fill a micro-batch of {config.train_microbatch_size}; nearest: -tmbs {samples}"
        )


def _divides(config: Config, large: str, large_flag: str, small: str, small_flag: str) -> Iterator[str]:
    whole, part = getattr(config, large), getattr(config, small)
    if whole % part:
        near = _nearest(min(part, whole), lambda n: whole % n == 0)
        why = (
            f"{small_flag} {part} exceeds {large_flag} {whole}"
            if part > whole
            else f"{whole} % {part} = {whole % part}"
        )
        yield (
            f"{large_flag[1:]} % {small_flag[1:]} must be 0, and {why} "
            f"({large_flag} counts the prompts that {small_flag} cuts up); nearest: {small_flag} {near}"
        )


def _sampling(config: Config) -> Iterator[str]:
    if config.num_generations < 2 and config.algo == "GRPO":
        yield "-g 1: GRPO compares the samples of a prompt and learns nothing from one; use -g 2 or more"
    if config.producer_tensor_parallel_size > 1 and config.backend != "vllm":
        yield f"-ptp {config.producer_tensor_parallel_size}: only the vllm backend is tensor parallel; use -b vllm"


def _nearest(start: int, valid: Callable[[int], bool]) -> int | None:
    """The valid positive number closest to `start`, the larger one of two."""
    for distance in range(100_000):
        for candidate in (start + distance, start - distance):
            if candidate >= 1 and valid(candidate):
                return candidate
    return None


def _either(*choices: tuple[str, int | None]) -> str:
    return " or ".join(f"{name} {value}" for name, value in choices if value is not None)
