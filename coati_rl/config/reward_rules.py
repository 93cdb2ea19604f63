"""Check which rewards and settings are combined: contradictions are refused, settings without effect and risks are
warned about.
"""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.fields import described, spelling
from coati_rl.config.reward import RewardConfig
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import ENVIRONMENT_REWARD, MATH_REWARDS, has_host, is_url, parse_reward_type
from coati_rl.reward_url import redacted


def reward_problems(config: Config) -> Iterator[str]:
    """Why responses cannot be scored like this, each with a remedy."""
    reward = config.reward
    try:
        names = [part.name for part in parse_reward_type(reward.reward_type)]
    except ConfigError as error:
        yield str(error)
        return
    if ENVIRONMENT_REWARD in names and not config.environment.gives_rewards:
        yield (
            f"--reward-type {ENVIRONMENT_REWARD}: there is no environment to give rewards; give --env FILE.py:CLASS of "
            f"{config.COMMAND}, or another reward"
        )
    answers = [name for name in names if name in MATH_REWARDS]
    if "code" in names and answers:
        yield (
            f"--reward-type {reward.reward_type}: code is scored by a row's test_cases, {answers[0]} by its gt_answer, "
            "and a response has one ground truth; use one of them, or a task for each (--tasks)"
        )
    if reward.reward_clip is not None and not reward.reward_clip[0] < reward.reward_clip[1]:
        low, high = reward.reward_clip
        yield f"--reward-clip {low:g},{high:g}: must be two numbers in order, like -10,10"
    yield from _of_turns(config)
    is_run_here = reward.scores_code and reward.code_verifier_api_url is None
    if is_run_here and reward.test_timeout_s >= reward.response_timeout_s:
        yield (
            f"--test-timeout-s {reward.test_timeout_s:g} must be below --reward-timeout-s "
            f"{reward.response_timeout_s:g}, which all tests of a response share; "
            f"use --reward-timeout-s {6 * reward.test_timeout_s:g}"
        )


def _of_turns(config: Config) -> Iterator[str]:
    """Refuse what changes episodes' rewards where a critic learns from those that an environment gave their turns."""
    reward, environment = config.reward, config.environment
    if not (config.algorithm.has_critic and environment.gives_rewards):
        return
    given = ["--reward-normalize"] if reward.reward_normalize else []
    if reward.reward_clip is not None:
        given.append("--reward-clip {:g},{:g}".format(*reward.reward_clip))
    if given:
        source = "--env" if environment.env is not None else "--agent-command"
        yield (
            f"--advantage-estimator {config.algorithm.advantage_estimator} and {source} with {' and '.join(given)}: it "
            "changes the reward of a whole episode, and turns have rewards of their own; leave it out, or use another "
            "estimator"
        )


def reward_warnings(config: Config) -> Iterator[str]:
    """Return what can be done, and is hardly meant or dangerous."""
    data, reward = config.data, config.reward
    by_task = [each.reward for each in config.by_task.values()]
    given = _given_for("code", reward)
    runs_code = any(each.scores_code for each in by_task)
    if given and not runs_code and not ("python" in config.environment.tools and reward.run_model_code_without_sandbox):
        yield f"{', '.join(given)}: only --reward-type code runs programs; without it this has no effect"
    elif given and reward.code_verifier_api_url is not None:
        yield f"{', '.join(given)}: with --code-verifier-api-url the service's own settings count; this has no effect"
    elif reward.run_model_code_without_sandbox:
        yield (
            "--run-model-code-without-sandbox: programs that the model writes run with your rights: they can read, "
            "change and delete your files, use your keys and your network; leave it out to run them in the sandbox"
        )
    if reward.reward_devices != 1 and not config.reward_models.names:
        yield f"--reward-devices {reward.reward_devices}: only -rt model:DIRECTORY has devices; this has no effect"
    if _given_for("math", reward) and not any(each.scores_math for each in by_task):
        yield f"--math-answer {reward.math_answer}: only {' and '.join(MATH_REWARDS)} compare answers; no effect"
    if data.answer_key is not None and all(each.scores_code for each in by_task):
        yield f"--answer-key {data.answer_key}: --reward-type code is scored by test_cases; this has no effect"
    is_scored_there = reward.code_verifier_api_url is not None and all(each.reward_type == "code" for each in by_task)
    if reward.reward_workers > 1 and is_scored_there:
        yield (
            f"--reward-workers {reward.reward_workers}: with --code-verifier-api-url nothing is scored here; the "
            "service has its own number of processes"
        )


def service_problems(config: Config) -> Iterator[str]:
    """Why no service can score like this."""
    reward = config.reward
    url = reward.code_verifier_api_url
    if url is None:
        return
    if not is_url(url) or not has_host(url):
        yield (
            f"--code-verifier-api-url {redacted(url)}: is no address of a service; use http://HOST:PORT or "
            "https://HOST:PORT"
        )
    by_task = [each.reward for each in config.by_task.values()]
    if any(each.reward_combine is not None and each.reward_type == "code" for each in by_task):
        yield "--code-verifier-api-url with --reward-combine: the service's reward is the only one; leave one out"
    mixed = [each.reward_type for each in by_task if each.scores_code and each.reward_type != "code"]
    if mixed or all(each.reward_type != "code" for each in by_task):
        reward_type = mixed[0] if mixed else reward.reward_type
        yield f"--code-verifier-api-url with --reward-type {reward_type}: serves code alone; use -rt code"


def _given_for(kind: str, reward: RewardConfig) -> list[str]:
    """Flags that only rewards of one kind read, and that are not at their defaults."""
    values = reward.model_dump()
    return [
        spelling(name, field)
        for name, field in RewardConfig.model_fields.items()
        if described(field, "only_for") == kind and values[name] != field.default
    ]
