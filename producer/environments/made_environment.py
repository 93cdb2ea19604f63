"""Make the environment that a configuration names."""

from pathlib import Path
from typing import Protocol

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import ENVIRONMENT_REWARD
from coati_rl.runtime.resources import load_tokenizer
from producer.environments.chat import ChatTemplate
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.environment import Environment
from producer.environments.episode import EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.environments.own_episode import episode_factory
from producer.environments.process_host import ProcessHost

_REWARD_NAMES = "reward_fn(messages, answer) or a BaseRewardFunction"


class OwnedEnvironment(Environment, Protocol):
    """Run episodes with threads or processes of its own, which end with it."""

    def close(self) -> None:
        """End them."""


def check_environment(config: Config) -> None:
    """Raise ConfigError if the environment of a run cannot be made; nothing is started."""
    environment = config.environment
    if environment.env is not None:
        form = episode_factory(environment.env, environment.arguments)
        types = {each.reward.reward_type for each in config.by_task.values()}
        if ENVIRONMENT_REWARD in types and not form.gives_rewards:
            raise ConfigError(
                f"--env {environment.env}: gives no rewards; define {_REWARD_NAMES} in the file, or name another -rt"
            )


def make_environment(config: Config) -> OwnedEnvironment | None:
    """Make the environment of a producer; None: single answers.

    Args:
        config: prepared: the model is a directory.
    """
    environment = config.environment
    if environment.env is None:
        return None
    name, arguments, timeout_s = environment.env, environment.arguments, environment.env_timeout
    tokenizer = load_tokenizer(Path(config.model.model), chat_template=config.data.chat_template)
    limits = RunLimits(
        model=str(config.model.model),
        chat_template=config.data.chat_template,
        max_turns=environment.max_turns,
        max_tokens=config.max_model_len,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    is_apart = environment.env_isolation == "process"
    return EpisodeEnvironment(
        episode_factory(name, arguments, limits).make,
        ChatTemplate(tokenizer),
        EpisodeLimits(max_turns=environment.max_turns, max_tokens=config.max_model_len, timeout_s=timeout_s),
        correct_from={
            name: each.reward.correct_from
            for name, each in config.by_task.items()
            if each.reward.reward_type == ENVIRONMENT_REWARD
        },
        seed=config.run.seed,
        may_renormalise=config.recomputes_old_logprobs,
        host=ProcessHost(name, arguments, timeout_s=timeout_s, limits=limits) if is_apart else None,
    )
