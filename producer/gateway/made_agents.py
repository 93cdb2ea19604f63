"""Make the environment of --agent-command."""

import shlex
from pathlib import Path

from coati_rl.config import Config
from coati_rl.preflight.resources import load_run_tokenizer
from coati_rl.reading.ground_truth import ANSWER_KEYS
from coati_rl.reward_spec import ENVIRONMENT_REWARD
from producer.environments.chat import ChatTemplate
from producer.gateway.agent_environment import AgentCommand, AgentEnvironment
from producer.gateway.conversations import Language, tool_format_or_none

_TESTS = "test_cases"  # a ground truth, too


def make_agents(config: Config, *, errors: Path | None = None) -> AgentEnvironment:
    """Make the environment of a producer.

    Args:
        config: prepared, with --agent-command: the model is a directory.
        errors: as of `AgentEnvironment`.
    """
    environment, data = config.environment, config.data
    tokenizer = load_run_tokenizer(Path(config.model.model), data, needs_chat_template=data.input_template is None)
    truth_columns = {_TESTS, *ANSWER_KEYS, *filter(None, (each.data.answer_key for each in config.by_task.values()))}
    return AgentEnvironment(
        AgentCommand(
            command=tuple(shlex.split(environment.agent_command or "")),
            timeout_s=environment.agent_timeout,
            max_processes=environment.agent_processes,
            with_ground_truth=environment.agent_ground_truth,
            truth_columns=frozenset(truth_columns),
        ),
        Language(tokenizer, ChatTemplate(tokenizer), tool_format_or_none(tokenizer, environment.tool_format)),
        correct_from={
            name: each.reward.correct_from
            for name, each in config.by_task.items()
            if each.reward.reward_type == ENVIRONMENT_REWARD
        },
        seed=config.run.seed,
        may_renormalise=config.recomputes_old_logprobs,
        errors=errors,
    )
