"""Check which rewards and settings are combined: contradictions are refused, settings without effect and risks are
warned about.
"""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.fields import described
from coati_rl.config.reward import RewardConfig
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import MATH_REWARDS, has_host, is_url, parse_reward_type
from coati_rl.reward_url import redacted

_OF_CODE = [name for name, field in RewardConfig.model_fields.items() if described(field, "only_for") == "code"]


def reward_problems(config: Config) -> Iterator[str]:
    """Why responses cannot be scored like this, each with a remedy."""
    reward = config.reward
    try:
        names = [part.name for part in parse_reward_type(reward.reward_type)]
    except ConfigError as error:
        yield str(error)
        return
    answers = [name for name in names if name in MATH_REWARDS]
    if "code" in names and answers:
        yield (
            f"--reward-type {reward.reward_type}: code is scored by a row's test_cases, {answers[0]} by its gt_answer, "
            "and a response has one ground truth; use one of them"
        )
    yield from _service(config)
    is_run_here = reward.scores_code and reward.code_verifier_api_url is None
    if is_run_here and reward.test_timeout_s >= reward.response_timeout_s:
        yield (
            f"--test-timeout-s {reward.test_timeout_s:g} must be below --reward-timeout-s "
            f"{reward.response_timeout_s:g}, which all tests of a response share; "
            f"use --reward-timeout-s {6 * reward.test_timeout_s:g}"
        )


def reward_warnings(config: Config) -> Iterator[str]:
    """Return what can be done, and is hardly meant or dangerous."""
    data, reward = config.data, config.reward
    given = [f"--{name.replace('_', '-')}" for name in _OF_CODE if getattr(config.reward, name) != _default(name)]
    if given and not reward.scores_code:
        yield f"{', '.join(given)}: only --reward-type code runs programs; without it this has no effect"
    elif given and reward.code_verifier_api_url is not None:
        yield f"{', '.join(given)}: with --code-verifier-api-url the service's own settings count; this has no effect"
    elif reward.run_model_code_without_sandbox:
        yield (
            "--run-model-code-without-sandbox: programs that the model writes run with your rights: they can read, "
            "change and delete your files, use your keys and your network; leave it out to run them in the sandbox"
        )
    if reward.math_answer != _default("math_answer") and not reward.scores_math:
        yield f"--math-answer {reward.math_answer}: only {' and '.join(MATH_REWARDS)} compare answers; no effect"
    if data.answer_key is not None and reward.scores_code:
        yield f"--answer-key {data.answer_key}: --reward-type code is scored by test_cases; this has no effect"
    if reward.reward_workers > 1 and reward.code_verifier_api_url is not None:
        yield (
            f"--reward-workers {reward.reward_workers}: with --code-verifier-api-url nothing is scored here; the "
            "service has its own number of processes"
        )


def _service(config: Config) -> Iterator[str]:
    reward = config.reward
    url = reward.code_verifier_api_url
    if url is None:
        return
    if not is_url(url) or not has_host(url):
        yield (
            f"--code-verifier-api-url {redacted(url)}: is no address of a service; use http://HOST:PORT or "
            "https://HOST:PORT"
        )
    if reward.reward_type != "code":
        yield f"--code-verifier-api-url with --reward-type {reward.reward_type}: serves code alone; use -rt code"


def _default(name: str) -> object:
    return RewardConfig.model_fields[name].default
