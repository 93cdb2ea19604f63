"""Check the settings of episodes of several turns: those without effect are refused, odd ones are warned about."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.environment import EnvironmentConfig
from coati_rl.config.fields import spelling
from coati_rl.plugins import is_plugin


def environment_problems(config: Config) -> Iterator[str]:
    """Why episodes cannot be run like this, each with a remedy."""
    environment, data = config.environment, config.data
    if not environment.is_given:
        values = environment.model_dump()
        given = [
            f"{spelling(name, field)} {values[name]}"
            for name, field in EnvironmentConfig.model_fields.items()
            if values[name] != field.default
        ]
        if given:
            yield f"{', '.join(given)} without --env: has no effect; give --env FILE.py:CLASS, or leave it out"
        return
    if environment.env is not None and not (is_plugin(environment.env) or environment.env.endswith(".py")):
        yield f"--env {environment.env}: is no environment; write FILE.py:CLASS"
    if environment.stale_episodes == "cut" and config.sync.n_behind == 0:
        yield (
            "--stale-episodes cut with --n-behind 0: has no effect, as trainers wait for every prompt of a rollout "
            "step; use --n-behind 1, or leave it out"
        )
    if data.input_template is not None:
        yield "--env with --input-template: turns are written by a chat template; leave it out, or use --chat-template"


def environment_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    environment, sampling = config.environment, config.sampling
    if not environment.is_given:
        return
    if sampling.max_episode_tokens is None and environment.max_turns > 1:
        yield (
            f"--env without --max-episode-tokens: the turns of an episode share mpt + mnt = {config.max_model_len} "
            "tokens"
        )
    longest_s = environment.max_turns * environment.env_timeout
    limit_s = config.cluster.stall_timeout_s
    if not config.sync.inflight_update and longest_s > limit_s:
        yield (
            f"--max-turns {environment.max_turns} * --env-timeout {environment.env_timeout:g} = {longest_s:g} s exceed "
            f"--stall-timeout-s {limit_s:g}, in which a weight update waits for open episodes; use --inflight-update, "
            "or less time"
        )
