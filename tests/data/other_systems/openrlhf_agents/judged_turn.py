"""The executor of one answer, whose reward a subclass gives."""

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine):
        output = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        ((begin, end),) = output["action_ranges"]
        text = hf_tokenizer.decode(output["observation_tokens"][begin:end], skip_special_tokens=True)
        output.update(reward=float(text == label), scores=float(text == label))
        return output
