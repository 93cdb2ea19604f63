"""Parse the arguments that `score` and `serve` share to a RewardSpec."""

import argparse
import math
import os
from typing import get_args

from coati_rl.errors import ConfigError
from coati_rl.plugins import absolute_plugin, is_plugin
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
from rewards.scoring import check_scorer

_LEAST = {"num_workers": 1, "timeout_s": 0, "test_timeout_s": 0, "test_memory_mb": 32}  # 0: must be positive


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the reward."""
    spec = RewardSpec(reward_type="boxed")  # provides the defaults
    parser.add_argument("--type", required=True, help="reward type, as -rt/--reward-type of a run")
    parser.add_argument(
        "--timeout-s",
        type=float,
        help=f"seconds that one response may take (default: {TIMEOUT_S:g} for math, else {LONG_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--reward-combine",
        help="FILE.py:FUNCTION that makes one reward of several, as --reward-combine of a run",
    )
    parser.add_argument(
        "--math-answer",
        choices=get_args(MathAnswer),
        default=spec.math_answer,
        help="if the ground truth is a number: the answer must be a number, or any formula of its value "
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
    """Build the RewardSpec of the flags.

    Raises: ConfigError for a reward that cannot be made, a sandbox that does not work, or a size that is too small.
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
    combine = options.reward_combine
    if combine is not None and not is_plugin(combine):
        raise ConfigError(f"--reward-combine {combine}: write FILE.py:FUNCTION")
    parts = parse_reward_type(reward_type)
    spec = RewardSpec(
        reward_type=reward_type,
        secrets=secrets_of(reward_type, os.environ),
        timeout_s=options.timeout_s or default_timeout_s(parts),
        math_answer=options.math_answer,
        combine=combine and absolute_plugin(combine),
        test_timeout_s=options.test_timeout_s,
        test_memory_mb=options.test_memory_mb,
        is_sandboxed=not options.run_model_code_without_sandbox,
    )
    if any(part.name == "code" for part in parts) and spec.test_timeout_s >= spec.timeout_s:
        raise ConfigError(
            f"--test-timeout-s {spec.test_timeout_s:g} must be below --timeout-s {spec.timeout_s:g}, which all "
            f"tests of a response share; use --timeout-s {6 * spec.test_timeout_s:g}"
        )
    check_scorer(spec)  # raises before input is read or a port is opened
    if spec.is_sandboxed and any(part.name == "code" for part in parts):
        from coati_rl.sandbox import check_sandbox

        check_sandbox()
    return spec
