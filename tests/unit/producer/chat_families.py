"""Make a small tokenizer of each family of models: a byte-level BPE, the family's special tokens, its chat template.

The templates are those of the models, as trl's wheel holds them (trl/chat_templates, read without importing trl), and
Mistral's, which mistral_common 1.13.1 generates (tests/data/chat_templates).
"""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.types import Completion, FinishReason

MISTRAL = Path(__file__).resolve().parents[2] / "data/chat_templates"

# Special tokens, the one that begins a text and the one that ends the policy's turn first; after the bar, added tokens
# that are not special.
_CHATML = "<|endoftext|> <|im_end|> <|im_start|> | <tool_call> </tool_call>"
_THINKING = f"{_CHATML} <tool_response> </tool_response> <think> </think>"
_DEEPSEEK = (
    "<|begin▁of▁sentence|> <|end▁of▁sentence|> <|User|> <|Assistant|> <|tool▁calls▁begin|> <|tool▁call▁begin|> "
    "<|tool▁sep|> <|tool▁call▁end|> <|tool▁calls▁end|> <|tool▁outputs▁begin|> <|tool▁output▁begin|> "
    "<|tool▁output▁end|> <|tool▁outputs▁end|>"
).replace("|", "\uff5c") + " | <think> </think>"
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


def _with_tokens(specials: Sequence[str], *, family: str, rstrip: bool = False) -> Any:
    """The BPE with the special and added tokens of these families, and one's ends and template."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(_bpe())
    for special, _, added in (text.partition(" | ") for text in specials):
        inner.add_special_tokens([AddedToken(text, rstrip=rstrip, special=True) for text in special.split()])
        inner.add_tokens([AddedToken(text, special=False) for text in added.split()])
    begin, end = FAMILIES[family].split()[:2]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=begin, eos_token=end, chat_template=template_text(family)
    )


@functools.cache
def family_tokenizer(family: str, *, rstrip: bool = False) -> Any:
    """The tokenizer of a family; `rstrip`: its special tokens take the white space after them along, as Phi-3's do."""
    return _with_tokens([FAMILIES[family]], family=family, rstrip=rstrip)


def tokenizers_of_one_vocabulary(families: Sequence[str]) -> dict[str, Any]:
    """The families' tokenizers with the special tokens of all of them, so that one model serves all."""
    specials = [FAMILIES[family] for family in families]
    return {family: _with_tokens(specials, family=family) for family in families}


def completion(token_ids: Sequence[int], *, finish_reason: FinishReason = "stop", text: str = "") -> Completion:
    """An engine's answer: log-probabilities -1/8, -2/8, ..., versions 4 and, in the second half, 5."""
    places = np.arange(len(token_ids))
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=(-(places + 1) / 8).astype(np.float32),
        policy_versions=np.where(places * 2 < len(places), 4, 5).astype(np.int32),
        finish_reason=finish_reason,
        text=text,
    )
