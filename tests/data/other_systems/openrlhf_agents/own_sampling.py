"""An executor that says at its first call how it is sampled, and imports where it needs to."""


def make_base():
    from openrlhf.utils.agent import AgentExecutorBase

    return AgentExecutorBase


class AgentExecutor(make_base()):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        from openrlhf.utils.logging_utils import init_logger

        init_logger(__name__).info("asked")
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        own = {"temperature": 0.25, "max_tokens": 3, "stop": None, "min_p": 0.0}
        output = (await llm_engine.generate(prompt_token_ids=tokens, sampling_params=own)).outputs[0]
        tokens = tokens + output.token_ids
        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        return {"reward": 1.0, "observation_tokens": tokens + output.token_ids}
