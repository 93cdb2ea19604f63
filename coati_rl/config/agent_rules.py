"""Check the settings of agents that are programs: a second environment is refused, odd ones are warned about."""

from collections.abc import Iterator

from coati_rl.config.config import Config


def agent_problems(config: Config) -> Iterator[str]:
    """Why agents cannot be run like this, with a remedy."""
    environment = config.environment
    others = {"--env": environment.env, "--tools": environment.tools, "--mcp-server": environment.mcp_server}
    given = [flag for flag, value in others.items() if value]
    if environment.agent_command is not None and given:
        yield f"{', '.join(given)} with --agent-command: the agent is the environment; leave one of them out"


def agent_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    environment, limit_s = config.environment, config.cluster.stall_timeout_s
    if environment.agent_command is None:
        return
    if config.sampling.max_episode_tokens is None:
        yield (
            f"--agent-command without --max-episode-tokens: a call has mpt + mnt = {config.max_model_len} tokens, its "
            "messages included"
        )
    if not config.sync.inflight_update and environment.agent_timeout > limit_s:
        yield (
            f"--agent-timeout {environment.agent_timeout:g} s exceeds --stall-timeout-s {limit_s:g}, in which a weight "
            "update waits for open episodes; use --inflight-update, or less time"
        )
