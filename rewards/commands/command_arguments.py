"""Parse the arguments that `score` and `serve` share to a RewardSpec and the size of a pool."""

import argparse
import math
import os
from typing import get_args

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import (
    LONG_TIMEOUT_S,
    TIMEOUT_S,
    MathAnswer,
    RewardSpec,
    absolute_reward_type,
    default_timeout_s,
    parse_reward_type,
)
from coati_rl.reward_url import secrets_of
from rewards.registry import make_reward

_LEAST = {"num_workers": 1, "timeout_s": 0, "test_timeout_s": 0, "test_memory_mb": 32}  # 0: more than that


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is scored with."""
    spec = RewardSpec(reward_type="boxed")  # the defaults are its own
    parser.add_argument("--type", required=True, help="reward type, as -rt/--reward-type of a run")
    parser.add_argument(
        "--timeout-s",
        type=float,
        help=f"seconds that one response may take (default: {TIMEOUT_S:g} for math, else {LONG_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--math-answer",
        choices=get_args(MathAnswer),
        default=spec.math_answer,
        help="where the ground truth is a number: the answer must be one, or any formula of its value "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--test-timeout-s",
        type=float,
        default=spec.test_timeout_s,
        help="CPU seconds that a program may take for one test (default: %(default)g)",
    )
    parser.add_argument(
        "--test-memory-mb",
        type=int,
        default=spec.test_memory_mb,
        help="memory that a program may take, in MiB (default: %(default)d)",
    )
    parser.add_argument(
        "--run-model-code-without-sandbox",
        action="store_true",
        help="run programs that a model wrote with all your rights: they can read your keys and delete your files",
    )


def reward_spec(options: argparse.Namespace) -> RewardSpec:
    """Return what the flags ask for.

    Raises: ConfigError for a reward that cannot be made, a sandbox that cannot be had, or a size that is too small.
    """
    for flag, least in _LEAST.items():
        value = getattr(options, flag)
        if value is not None and not (least < value < math.inf or value == least > 0):
            needed = f"at least {least}" if least else "positive and finite"
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}: it must be {needed}")
    try:
        reward_type = absolute_reward_type(options.type)  # scoring processes may have another working directory
    except ValueError as error:
        raise ConfigError(f"--type {error}") from error
    parts = parse_reward_type(reward_type)
    spec = RewardSpec(
        reward_type=reward_type,
        secrets=secrets_of(reward_type, os.environ),
        timeout_s=options.timeout_s or default_timeout_s(parts),
        math_answer=options.math_answer,
        test_timeout_s=options.test_timeout_s,
        test_memory_mb=options.test_memory_mb,
        is_sandboxed=not options.run_model_code_without_sandbox,
    )
    if any(part.name == "code" for part in parts) and spec.test_timeout_s >= spec.timeout_s:
        raise ConfigError(
            f"--test-timeout-s {spec.test_timeout_s:g} must be below --timeout-s {spec.timeout_s:g}, which all "
            f"tests of a response share; use --timeout-s {6 * spec.test_timeout_s:g}"
        )
    make_reward(spec)  # refused before anything is read or listens
    if spec.is_sandboxed and any(part.name == "code" for part in parts):
        from coati_rl.sandbox import check_sandbox

        check_sandbox()
    return spec
