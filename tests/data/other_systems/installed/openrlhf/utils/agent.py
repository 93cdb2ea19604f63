"""The base classes of an installed OpenRLHF: abstract, and with a loop that counts what goes through it."""

from abc import ABC, abstractmethod
from copy import deepcopy

PLAYED = []


class AgentInstanceBase(ABC):
    @abstractmethod
    def __init__(self, *args, **kwargs):
        pass

    async def reset(self, states: dict, **kwargs):
        return states

    @abstractmethod
    async def step(self, state_dict: dict, **kwargs):
        raise NotImplementedError


class AgentExecutorBase(ABC):
    @abstractmethod
    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        raise NotImplementedError


class MultiTurnAgentExecutor(AgentExecutorBase):
    def __init__(self, agent_instance_cls):
        assert issubclass(agent_instance_cls, AgentInstanceBase)
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None):
        instance = self.agent_instance_cls()
        assert isinstance(instance, AgentInstanceBase)
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens = hf_tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        assert len(tokens) <= max_length - sampling_params.max_tokens
        assert sampling_params.logprobs is None
        ranges, total = [], 0
        while True:
            sampling_params.max_tokens = max_length - len(tokens)
            version = llm_engine.get_weight_version()
            request = await llm_engine.generate(tokens, deepcopy(sampling_params), multi_modal_data=images)
            output = request.outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            PLAYED.append((version, output.text, output.finish_reason))
            states = {
                "observation_text": text,
                "action_text": output.text,
                "label": label,
                "sampling_params": sampling_params,
            }
            step = await instance.step(states)
            total += step["rewards"].item()
            text = text + output.text + step["environment_feedback"]
            feedback = hf_tokenizer(step["environment_feedback"], add_special_tokens=False)["input_ids"]
            tokens = tokens + output.token_ids + feedback
            if step["done"]:
                break
        return {
            "reward": total,
            "scores": step.get("scores", total),
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "action_loss_mask": [1, 1],
            "rollout_log_probs": None,
            "extra_logs": step.get("extra_logs", {}),
        }
