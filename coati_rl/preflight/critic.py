"""Find the model that a run's critic begins with, and check that it can value the policy's tokens."""

from collections.abc import Callable
from typing import Any

from coati_rl.config import Config
from coati_rl.preflight.resources import checked_model_config, read_model_config, read_tokenizer, resolve_model
from coati_rl.preflight.same_tokens import check_positions, check_vocabulary


def with_critic(
    config: Config, tokenizer: Any, *, check_layout: Callable[..., None], is_dry_run: bool
) -> tuple[Config, list[str]]:
    """Return the config with its critic's start as a directory, if it has one, and warnings.

    Args:
        config: of the run; its model is a directory.
        tokenizer: of the model.
        check_layout: as of `prepare`.
        is_dry_run: do not fetch a model.
    Raises: ConfigError if this model cannot be the critic.
    """
    if not config.algorithm.has_critic:
        return config, []
    named = config.critic.critic_model or config.model.model
    flag = "--model" if config.critic.critic_model is None else "--critic-model"
    directory = resolve_model(named, is_dry_run=is_dry_run, flag=flag)
    if directory is None:
        return config, [f"{flag} {named} is not on this machine: vocabulary and layout of the critic are not checked"]
    if flag == "--critic-model":
        its_tokenizer, its_config = read_tokenizer(directory, flag), read_model_config(directory, flag)
        check_vocabulary(tokenizer, its_tokenizer, model=config.model.model, other=f"{flag} {named}")
        check_positions(config, its_config, other=f"{flag} {named}")
        check_layout(config, its_config, f"{flag} {named}")
        config = config.with_changes(critic_model=str(directory))
    _, warnings = checked_model_config(directory, "valued", flag=flag, is_dry_run=is_dry_run)
    return config, warnings
