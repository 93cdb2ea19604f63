"""Make what scores a run's responses from its configuration: tried where the run starts, made in each producer."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace

from coati_rl.config import Config
from coati_rl.config.reward import reward_spec
from coati_rl.protocols import GroupScorer
from coati_rl.reward_spec import parse_reward_type
from coati_rl.reward_url import secrets_of
from rewards.registry import make_reward
from rewards.workers.pool import RewardPool


def scorer_factory(config: Config) -> Callable[[], GroupScorer]:
    """Processes on the producer's node, or with --code-verifier-api-url a client of the service.

    Tried here: a function of the user's is imported, a program is run in the sandbox, the service is asked. No process
    stays. The service's token, and the variables that an address names, come from this process's environment, which
    other nodes need not have, and go into the factory.

    Args:
        config: checked by `rules.check`.
    Returns: a picklable factory.
    Raises: ConfigError with the flag and what to do.
    """
    reward = config.reward
    if reward.code_verifier_api_url is not None:
        return _of_service(reward.code_verifier_api_url, config)
    spec = replace(reward_spec(config.reward), secrets=secrets_of(reward.reward_type, os.environ))
    timeout_s = spec.timeout_s
    if make_reward(spec).is_batch:  # the responses of a group share the time of all, and parts come one after another
        spec = replace(spec, group_timeout_s=timeout_s * config.sampling.num_generations)
        timeout_s *= config.sampling.num_generations * len(parse_reward_type(spec.reward_type))
    if reward.scores_code and spec.is_sandboxed:
        from coati_rl.sandbox import check_sandbox

        check_sandbox()
    return functools.partial(RewardPool, spec, num_workers=reward.reward_workers, timeout_s=timeout_s)


def _of_service(url: str, config: Config) -> Callable[[], GroupScorer]:
    reward = config.reward
    from rewards.remote.client import RemoteScorer, check_service, token_from_environment

    token = token_from_environment()
    check_service(url, token=token, reward_type=reward.reward_type)
    # The service may score the responses of a group one after another.
    timeout_s = reward.response_timeout_s * config.sampling.num_generations
    return functools.partial(RemoteScorer, url, token=token, reward_type=reward.reward_type, timeout_s=timeout_s)
