"""Ask the engine with tokens: a subclass of OpenRLHF's AgentExecutorBase, as its README asks for (Multi-Turn Agent).

The policy answers twice; the reward is for repeating itself. coati-rl rl --env openrlhf_executor.py ...
"""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        action_ranges, texts = [], []
        for turn in range(2):
            sampling_params.max_tokens = max_length - len(tokens)
            if sampling_params.max_tokens <= 0:
                break
            output = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs[0]
            action_ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            texts.append(output.text)
            tokens = tokens + output.token_ids
            if turn == 0:
                tokens = tokens + hf_tokenizer("\nAgain: ", add_special_tokens=False)["input_ids"]
        reward = float(len(texts) == 2 and texts[0] == texts[1])
        return {
            "prompt": prompt,
            "label": label,
            "reward": reward,
            "scores": reward,
            "observation_tokens": tokens,
            "action_ranges": action_ranges,
            "rollout_log_probs": None,
            "extra_logs": {"turns": len(texts)},
        }
