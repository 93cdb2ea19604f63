"""Stand in for OpenRLHF's base classes of agents.

Source: github.com/OpenRLHF/OpenRLHF openrlhf/utils/agent.py; the loops do what theirs do, and record nothing, since the
run does.
"""

import asyncio
import copy
import importlib.util
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any


def init_logger(name: str) -> logging.Logger:
    """Stand in for OpenRLHF's logger."""
    return logging.getLogger(name)


class AgentInstanceBase:
    """Stand in for OpenRLHF's base class of environments."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the prompt as it is."""
        return states


class AgentExecutorBase:
    """Stand in for OpenRLHF's base class of agents that ask the engine themselves."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand in for OpenRLHF's loop over the steps of an AgentInstance."""

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Play an episode, as far as the context reaches. Returns: the sum of its rewards, the last step's scores."""
        agent = await make_instance(self.agent_instance_cls)
        text = (await finished(agent.reset({"observation": prompt, "label": label})))["observation"]
        tokens = _encoded(hf_tokenizer, text)
        ranges: list[tuple[int, int]] = []
        total: Any = 0
        step: Mapping[str, Any] = {}
        while (budget := max_length - len(tokens)) > 0:
            sampling_params.max_tokens = budget
            output = (await llm_engine.generate(tokens, copy.deepcopy(sampling_params))).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            states = {
                "observation_text": text,
                "action_text": output.text,
                "label": label,
                "sampling_params": sampling_params,
            }
            step = await finished(agent.step(states))
            refuse_images(step)
            total += step["rewards"].item() if hasattr(step["rewards"], "item") else step["rewards"]
            feedback = step["environment_feedback"]
            text += output.text + feedback
            tokens = [*tokens, *output.token_ids, *_encoded(hf_tokenizer, feedback)]
            sampling_params = step.get("sampling_params") or sampling_params
            if step["done"]:
                break
        return {
            "prompt": prompt,
            "label": label,
            "reward": total,
            "scores": step.get("scores", total),
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": None,
            "extra_logs": step.get("extra_logs", {}),
        }


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Stand in for OpenRLHF's executor of one answer.

    Args:
        remote_rm_url: FILE.py with a `reward_func(queries, prompts, labels)`; None: a subclass gives the reward.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        named = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
        if served := [each for each in named if not each.endswith(".py")]:
            raise ValueError(f"remote_rm_url {served[0]}: a served reward model is named by -rt, beside --env")
        self.reward_endpoints = named
        self.reward_func = _reward_func(named[0], type(self)) if named else None

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Ask once. Returns: the reward that `reward_func` gives, None without one."""
        tokens = _encoded(hf_tokenizer, prompt)
        output = (await llm_engine.generate(tokens, copy.deepcopy(sampling_params))).outputs[0]
        whole = [*tokens, *output.token_ids]
        given: Mapping[str, Any] = {}
        if self.reward_func is not None:
            query = hf_tokenizer.decode(whole, skip_special_tokens=False)
            given = await asyncio.to_thread(self.reward_func, [query], [prompt], [label])
        scores = given.get("scores")
        return {
            "prompt": prompt,
            "label": label,
            "reward": given.get("rewards"),
            "scores": given.get("rewards") if scores is None else scores,
            "observation_tokens": whole,
            "action_ranges": [(len(tokens), len(whole))],
            "rollout_log_probs": None,
            "truncated": output.finish_reason == "length",
            "extra_logs": given.get("extra_logs") or {},
        }


async def make_instance(made: Any, **arguments: Any) -> Any:
    """Return an object of an AgentInstance, whose constructor may be async, as OpenRLHF prints it."""
    instance = made.__new__(made)
    await finished(instance.__init__(**arguments))
    return instance


def refuse_images(step: Mapping[str, Any]) -> None:
    """Raise ValueError if a step has images, which the policy would not see."""
    if isinstance(step, Mapping) and step.get("environment_images"):
        raise ValueError("step returned environment_images; only text is supported")


async def finished(returned: Any | Awaitable[Any]) -> Any:
    """Return a value, awaited if it has to be."""
    return await returned if inspect.isawaitable(returned) else returned


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return [int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _reward_func(name: str, of: type) -> Callable[..., Any]:
    """Load the function of a file, which is named from the working directory or from the agent's own."""
    path = Path(name)
    if not path.is_file() and (beside := Path(inspect.getfile(of)).parent / name).is_file():
        path = beside
    spec = importlib.util.spec_from_file_location("reward_func", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"remote_rm_url {name}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = module.reward_func
    return found
