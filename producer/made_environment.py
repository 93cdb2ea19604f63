"""Make the environment that a configuration names."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from coati_rl.preflight.prompts import EnvironmentFacts
from coati_rl.preflight.resources import load_run_tokenizer
from coati_rl.reward_spec import ENVIRONMENT_REWARD, parse_reward_type
from producer.environments.chat import ChatTemplate, TemplateError, check_template
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.environment import Environment
from producer.environments.episode import EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.environments.own_episode import episode_factory
from producer.environments.process_host import ProcessHost
from producer.gateway.agent_task import check_agent
from producer.tools.call_formats import tool_format_for
from producer.tools.call_rules import call_rules
from producer.tools.tool_episode import ToolEpisode, ToolHost
from producer.tools.toolbox import check_python_tool, make_toolbox


class OwnedEnvironment(Environment, Protocol):
    """Run episodes with threads or processes of its own, which end with it."""

    def close(self) -> None:
        """End them."""


def check_environment(config: Config) -> EnvironmentFacts:
    """Check that the environment of a run can be made; what it needs is started, asked and ended.

    Returns: what it asks of prompts. Raises: ConfigError.
    """
    environment = config.environment
    if environment.agent_command is not None:
        check_agent(environment.agent_command)
    if environment.env is not None:
        form = episode_factory(environment.env, environment.arguments)
        types = {each.reward.reward_type for each in config.by_task.values()}
        if ENVIRONMENT_REWARD in types and not form.gives_rewards:
            raise ConfigError(
                f"--env {environment.env}: gives no rewards; define reward_fn(messages, answer) or a "
                "BaseRewardFunction in the file (or a list reward_functions), or name another -rt"
            )
        _check_counted_once(environment.env, form.rewards, types)
        if form.writes_messages and config.data.input_template is not None:
            raise ConfigError(
                f"--env {environment.env} with --input-template: its turns are messages, which a chat template writes; "
                "leave --input-template out, or use --chat-template"
            )
        return EnvironmentFacts(check_tokenizer=form.check_tokenizer)
    if not environment.has_tools:
        return EnvironmentFacts()
    is_isolated = not config.reward.run_model_code_without_sandbox
    check_python_tool(environment, is_isolated=is_isolated)
    toolbox = make_toolbox(environment, is_isolated=is_isolated)
    schemas = toolbox.schemas
    toolbox.close()

    def check_tokenizer(tokenizer: Any) -> None:
        tool_format_for(tokenizer, environment.tool_format)
        try:
            check_template(ChatTemplate(tokenizer, tools=schemas), roles=("tool", "user"))
        except TemplateError as error:
            raise ConfigError(f"--tools: {error}") from error

    return EnvironmentFacts(tools=schemas, check_tokenizer=check_tokenizer)


def _check_counted_once(env: str, rewards: Collection[str], reward_types: Collection[str]) -> None:
    """Raise ConfigError where -rt names what the agent of --env is scored with already."""
    file = Path(env if env.endswith(".py") else env.rpartition(":")[0])
    for part in (part for reward_type in reward_types for part in parse_reward_type(reward_type)):
        path, _, name = part.name.rpartition(":")
        if name in rewards and Path(path).resolve() == file.resolve():
            raise ConfigError(
                f"--reward-type {part.name} with --env {env}: the environment scores its episodes with {name} already, "
                "and it would count twice; leave it out of --reward-type"
            )


def make_environment(config: Config, *, log_dir: Path | None = None) -> OwnedEnvironment | None:
    """Make the environment of a producer; None: single answers.

    Args:
        config: prepared: the model is a directory.
        log_dir: of the run, in which agents' error output is kept; None: it is not.
    """
    environment = config.environment
    if not environment.is_given:
        return None
    if environment.agent_command is not None:
        from producer.gateway.made_agents import make_agents  # with a web server, which other runs do not load

        return make_agents(config, errors=None if log_dir is None else log_dir / "agents")
    data = config.data
    is_text = data.input_template is not None
    tokenizer = load_run_tokenizer(Path(config.model.model), data, needs_chat_template=not is_text)
    limits = EpisodeLimits(
        max_turns=environment.max_turns, max_tokens=config.max_model_len, timeout_s=environment.env_timeout
    )
    make = partial(
        EpisodeEnvironment,
        limits=limits,
        correct_from={
            name: each.reward.correct_from
            for name, each in config.by_task.items()
            if each.reward.reward_type == ENVIRONMENT_REWARD
        },
        seed=config.run.seed,
        may_renormalise=config.recomputes_old_logprobs,
    )
    if environment.env is None:
        toolbox = make_toolbox(environment, is_isolated=not config.reward.run_model_code_without_sandbox)
        template = ChatTemplate(tokenizer, tools=toolbox.schemas)
        tool_format = tool_format_for(tokenizer, environment.tool_format)
        make_episode = partial(ToolEpisode, toolbox, tool_format, tokenizer, rules=call_rules(template))
        host = ToolHost(make_episode, toolbox, timeout_s=limits.timeout_s)
        return make(make_episode, template, host=host)
    name, arguments = environment.env, environment.arguments
    run_limits = RunLimits(
        model=str(config.model.model),
        chat_template=data.chat_template,
        template_date=data.template_date,
        chat_template_kwargs=data.chat_template_kwargs,
        max_turns=limits.max_turns,
        max_tokens=limits.max_tokens,
        needs_chat_template=not is_text,
    )
    is_apart = environment.env_isolation == "process"
    return make(
        episode_factory(name, arguments, run_limits).make,
        ChatTemplate(tokenizer, writes_messages=not is_text),
        host=ProcessHost(name, arguments, timeout_s=limits.timeout_s, limits=run_limits) if is_apart else None,
    )
