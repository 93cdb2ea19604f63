"""Create the scorer of a run's responses from its configuration; it is checked in the driver, made in each producer."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from coati_rl.config import Config
from coati_rl.config.reward import reward_spec
from coati_rl.errors import RunError
from coati_rl.reward_spec import ENVIRONMENT_REWARD, RewardSpec
from coati_rl.reward_url import secrets_of
from coati_rl.types import Problem
from rewards.scoring import Factory, has_model, model_factory, pool_factory
from rewards.task_scorer import TaskScorer


def scorer_factory(config: Config, *, in_cluster: bool = True) -> Factory:
    """Return a factory of worker processes on the producer's node, or of a client with --code-verifier-api-url.

    With tasks: of a scorer that has these for each different reward.

    The scorer is checked here: a user's function is imported, a program is run in the sandbox, the service is called, a
    reward model's directory is read. No process remains. The service's token, and the variables that a URL names, are
    read from this process's environment and stored in the factory; other nodes need not have them.

    Args:
        config: checked by `rules.check`.
        in_cluster: reward models are actors of the run; else the scorer loads them in its own process.
    Returns: a picklable factory.
    Raises: ConfigError with the flag and the remedy.
    """
    actors = config.reward_models.names if in_cluster else {}
    if config.data.tasks is None and not config.data.generated_tasks:
        return _factory(config, actors)
    made: list[tuple[RewardSpec, Factory]] = []  # one for tasks of the same reward
    factories = {}
    for name, settings in config.by_task.items():
        spec = reward_spec(settings.reward)
        factory = next((factory for known, factory in made if known == spec), None)
        if factory is None:
            factory = _factory(settings, actors)
            made.append((spec, factory))
        factories[name] = factory
    return functools.partial(TaskScorer, factories)


def _factory(config: Config, actors: Mapping[str, Sequence[str]]) -> Factory:
    """Return the factory of one task's scorer from its settings."""
    reward = config.reward
    if reward.reward_type == ENVIRONMENT_REWARD:
        return _NoScorer
    if reward.code_verifier_api_url is not None and reward.reward_type == "code":
        return _of_service(reward.code_verifier_api_url, config)
    spec = replace(reward_spec(config.reward), secrets=secrets_of(reward.reward_type, os.environ))
    sizes = {"num_workers": reward.reward_workers, "group_size": config.sampling.largest_group}
    factory = model_factory(spec, **sizes, actors=actors) if has_model(spec) else pool_factory(spec, **sizes)
    if reward.scores_code and spec.is_sandboxed:
        from coati_rl.sandbox import check_sandbox

        check_sandbox()
    return factory


class _NoScorer:
    """Stand in for a scorer where an environment scores all episodes."""

    def submit(self, responses: Sequence[str], problem: Problem) -> NoReturn:
        """Raise RunError: there is nothing to score with."""
        raise RunError(f"{problem.uid}: its environment gave {len(responses)} episodes no score (-rt env)")

    def close(self) -> None:
        """Do nothing."""


def _of_service(url: str, config: Config) -> Factory:
    reward = config.reward
    from rewards.remote.client import RemoteScorer, check_service, token_from_environment

    token = token_from_environment()
    check_service(url, token=token, reward_type=reward.reward_type)
    # The service may score the responses of a group one after another.
    timeout_s = reward.response_timeout_s * config.sampling.largest_group
    return functools.partial(RemoteScorer, url, token=token, reward_type=reward.reward_type, timeout_s=timeout_s)
