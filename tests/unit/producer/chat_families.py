"""Make a small tokenizer of each family of models: a byte-level BPE, the family's special tokens, its chat template.

The templates are those of the models, as trl's wheel holds them (trl/chat_templates, read without importing trl), and
Mistral's, which mistral_common 1.13.1 generates (tests/data/chat_templates).
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

MISTRAL = Path(__file__).resolve().parents[2] / "data/chat_templates"

# Special tokens, the one that begins a text and the one that ends the policy's turn first; after the bar, added tokens
# that are not special.
_CHATML = "<|endoftext|> <|im_end|> <|im_start|> | <tool_call> </tool_call>"
_THINKING = f"{_CHATML} <tool_response> </tool_response> <think> </think>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> "
    "<｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜> <｜tool▁outputs▁end｜> | <think> </think>"
)
_LLAMA = "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|end_of_text|> <|eom_id|> <|python_tag|>"
_COHERE = (
    "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> "
    "<|START_RESPONSE|> <|END_RESPONSE|>"
)
_MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[TOOL_CONTENT] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
)
FAMILIES = {
    "qwen2_5": _CHATML,
    "qwen3": _THINKING,
    "qwen3_instruct_2507": _THINKING,
    "qwen3_5_think": _THINKING,
    "nemotron_3_nano": _THINKING,
    "deepseekv3": _DEEPSEEK,
    "deepseek_r1_distill": _DEEPSEEK,
    "glm4moe": "<|endoftext|> <|user|> <|assistant|> <|observation|> <|system|> [gMASK] <sop> | <think> </think>",
    "llama3": _LLAMA,
    "llama3_2": _LLAMA,
    "gemma3": "<bos> <end_of_turn> <start_of_turn>",
    "phi3": "<s> <|end|> <|user|> <|assistant|> <|system|> <|endoftext|>",
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gptoss": "<|startoftext|> <|return|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>",
    "lfm2_v2": "<|startoftext|> <|im_end|> <|im_start|> <|tool_call_start|> <|tool_call_end|>",
    "mistral_v3": _MISTRAL,
    "mistral_v7": _MISTRAL,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
_TEXT = (
    "What is the sum of 17 and 25? The answer is 42. Let me think about that: 17 + 25 = 42.\n\nassistant user system "
    '{"name": "add", "arguments": {"a": 17, "b": 25}} Übung macht den Meister, 日本語 and emoji 🙂.\n'
)


def template_text(family: str) -> str:
    """The family's chat template."""
    if family.startswith("mistral"):
        return (MISTRAL / f"{family}.jinja").read_text(encoding="utf-8")
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{family}.jinja").read_text(encoding="utf-8")


@functools.cache
def _bpe() -> str:
    """A byte-level BPE of 256 bytes and 120 merges, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=376, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    return str(tokenizer.to_str())


@functools.cache
def family_tokenizer(family: str, *, rstrip: bool = False) -> Any:
    """The tokenizer of a family; `rstrip`: its special tokens take the white space after them along, as Phi-3's do."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    special, _, added = FAMILIES[family].partition(" | ")
    inner = Tokenizer.from_str(_bpe())
    inner.add_special_tokens([AddedToken(text, rstrip=rstrip, special=True) for text in special.split()])
    inner.add_tokens([AddedToken(text, special=False) for text in added.split()])
    begin, end = special.split()[:2]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=begin, eos_token=end, chat_template=template_text(family)
    )
