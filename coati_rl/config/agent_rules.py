"""Check the settings of agents that are programs: settings without effect are refused."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.environment import EnvironmentConfig
from coati_rl.config.fields import spelling

AGENT_FIELDS = ("agent_timeout", "agent_processes", "agent_ground_truth")
_SHARED = ("agent_command", "tool_format", "stale_episodes")


def agent_problems(config: Config) -> Iterator[str]:
    """Why agents cannot be run like this, each with a remedy."""
    environment, fields = config.environment, EnvironmentConfig.model_fields
    is_agent = environment.agent_command is not None
    names = AGENT_FIELDS if not is_agent else [name for name in fields if name not in (*AGENT_FIELDS, *_SHARED)]
    given = [
        spelling(name, fields[name])
        for name in names
        if getattr(environment, name) != fields[name].get_default(call_default_factory=True)
    ]
    if is_agent and given:
        yield f"{', '.join(given)} with --agent-command: the agent is the environment; leave one of them out"
    elif given:
        yield f"{', '.join(given)} without --agent-command: has no effect; leave it out"


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
