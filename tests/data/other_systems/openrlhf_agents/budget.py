"""An executor that cuts its prompt to the budget of tokens, and hands images on, of which there are none."""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, multi_modal_data):
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        longest = max_length - sampling_params.max_tokens
        tokens = tokens[-longest:]
        params = deepcopy(sampling_params)
        request = await llm_engine.generate(tokens, params, multi_modal_data=multi_modal_data)
        output = request.outputs[0]
        return {
            "prompt": prompt,
            "label": label,
            "reward": float(output.text == "hm"),
            "scores": None,
            "observation_tokens": tokens + output.token_ids,
            "action_ranges": [(len(tokens), len(tokens) + len(output.token_ids))],
            "rollout_log_probs": None,
            "action_loss_mask": [1] * len(output.token_ids),
            "extra_logs": {"budget": sampling_params.max_tokens, "temperature": sampling_params.temperature},
        }
