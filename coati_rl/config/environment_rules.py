"""Warn about odd settings of episodes of several turns."""

from collections.abc import Iterator

from coati_rl.config.config import Config


def environment_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    environment, limit_s = config.environment, config.cluster.stall_timeout_s
    is_agent = environment.agent_command is not None
    if not environment.is_given:
        return
    if config.sampling.max_episode_tokens is None and (is_agent or environment.max_turns > 1):
        given = "--agent-command" if is_agent else "--tools" if environment.has_tools else "--env"
        shared = "a call, its messages included, has" if is_agent else "the turns of an episode share"
        yield f"{given} without --max-episode-tokens: {shared} mpt + mnt = {config.max_model_len} tokens"
    longest_s, limits = environment.agent_timeout, f"--agent-timeout {environment.agent_timeout:g} s exceeds"
    if not is_agent:
        turns, timeout_s = environment.max_turns, environment.env_timeout
        longest_s = turns * timeout_s
        limits = f"--max-turns {turns} * --env-timeout {timeout_s:g} = {longest_s:g} s exceed"
    if not config.sync.inflight_update and longest_s > limit_s:
        yield (
            f"{limits} --stall-timeout-s {limit_s:g}, in which a weight update waits for open episodes; use "
            "--inflight-update, or less time"
        )
