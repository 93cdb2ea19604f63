"""Check the settings of episodes of several turns: contradictions are refused, odd ones are warned about."""

from collections.abc import Iterator

from coati_rl.config.agent_rules import agent_problems, agent_warnings
from coati_rl.config.config import Config
from coati_rl.config.environment import EnvironmentConfig
from coati_rl.plugins import is_plugin


def environment_problems(config: Config) -> Iterator[str]:
    """Why episodes cannot be run like this, each with a remedy."""
    environment, data = config.environment, config.data
    yield from agent_problems(config)
    if environment.is_given and environment.stale_episodes == "cut" and config.sync.n_behind == 0:
        yield (
            "--stale-episodes cut with --n-behind 0: has no effect, as trainers wait for every prompt of a rollout "
            "step; use --n-behind 1, or leave it out"
        )
    if environment.agent_command is not None:
        return
    if environment.env is not None and environment.has_tools:
        yield "--tools, --mcp-server with --env: an environment of your own calls tools itself; leave one out"
    if environment.env is not None and not (is_plugin(environment.env) or environment.env.endswith(".py")):
        yield f"--env {environment.env}: is no environment; write FILE.py:CLASS"
    is_game = (environment.env or "").startswith("textarena:")
    if data.input_template is not None and (environment.has_tools or is_game):
        yield (
            f"{_name(environment)} with --input-template: its turns are messages, which a chat template writes; leave "
            "it out, or use --chat-template"
        )


def _name(environment: EnvironmentConfig) -> str:
    return "--tools" if environment.has_tools else "--env"


def environment_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    environment, sampling = config.environment, config.sampling
    yield from agent_warnings(config)
    if not environment.is_given or environment.agent_command is not None:
        return
    if sampling.max_episode_tokens is None and environment.max_turns > 1:
        yield (
            f"{_name(environment)} without --max-episode-tokens: the turns of an episode share mpt + mnt = "
            f"{config.max_model_len} tokens"
        )
    longest_s = environment.max_turns * environment.env_timeout
    limit_s = config.cluster.stall_timeout_s
    if not config.sync.inflight_update and longest_s > limit_s:
        yield (
            f"--max-turns {environment.max_turns} * --env-timeout {environment.env_timeout:g} = {longest_s:g} s exceed "
            f"--stall-timeout-s {limit_s:g}, in which a weight update waits for open episodes; use --inflight-update, "
            "or less time"
        )
