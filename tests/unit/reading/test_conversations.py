"""Test where the assistant's turns begin and end, with the chat templates of models."""

import copy

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from coati_rl.errors import ConfigError
from coati_rl.reading.conversations import encode_conversation
from coati_rl.reading.forms import Conversation
from coati_rl.reading.offline_samples import sft_samples
from tests.unit.producer.chat_families import family_tokenizer, template_text

QUESTION, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Two"}
GREETING = {"role": "assistant", "content": "Hello"}
TWO_TURNS = (QUESTION, ANSWER, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four"})
GREETED = (GREETING, QUESTION, ANSWER)


def learned(messages, tokenizer, loss_on="assistant"):
    """The loss tokens as text."""
    form = Conversation(messages=tuple(messages), where="line 7")
    (sample,) = sft_samples([form], tokenizer, max_length=4096, loss_on=loss_on).samples
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


def with_unnamed_special(*tokens, template):
    """A tokenizer of bytes, with tokens that are special in its file and have no name there."""
    tokenizer = copy.deepcopy(family_tokenizer("gemma3"))
    inner = tokenizer.backend_tokenizer
    inner.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", chat_template=template)


def test_a_turn_ends_with_the_special_token_that_ends_it_even_if_that_has_no_name():
    tokenizer = with_unnamed_special("<eos>", template=template_text("gemma3"))
    assert tokenizer.convert_tokens_to_ids("<end_of_turn>") not in tokenizer.all_special_ids
    assert learned(TWO_TURNS, tokenizer) == "Two<end_of_turn>Four<end_of_turn>"


def test_a_special_token_without_a_name_that_a_turn_quotes_does_not_end_it():
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    )
    tokenizer = with_unnamed_special("<eos>", "<image>", template=plain + "{% endif %}")
    quoting = (QUESTION, {"role": "assistant", "content": "Write <image> here"})
    assert learned(quoting, tokenizer) == "Write <image> here\n"
    named = copy.deepcopy(tokenizer)
    named.eos_token = "<image>"
    assert learned(quoting, named) == "Write <image>"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2_5", "Hello<|im_end|>Two<|im_end|>"),  # after a system message of the template's own
        ("qwen3", "Hello<|im_end|><think>\n\n</think>\n\nTwo<|im_end|>"),
        ("llama3", "Hello<|eot_id|>Two<|eot_id|>"),
        ("glm4moe", "\n<think></think>\nHello\n<think></think>\nTwo"),
    ],
)
def test_a_conversation_may_begin_with_the_assistant(family, text):
    tokenizer = family_tokenizer(family)
    assert learned(GREETED, tokenizer) == text
    last = learned(GREETED, tokenizer, "last")
    assert text.endswith(last) and "Hello" not in last


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        (
            "qwen3",
            TWO_TURNS,
            r"line 7: .*changes earlier messages when one is added \('<think>.*' becomes 'Two<\|im_end",
        ),
        ("gptoss", TWO_TURNS, r"line 7: .*changes earlier messages when one is added \('return\|>' becomes 'end\|>"),
        ("qwen3_5_think", GREETED, "line 7, messages 1 to 1 alone, by which a turn is located: .*No user query found"),
    ],
)
def test_a_row_whose_last_turn_can_be_located_is_refused_with_the_flag_that_takes_it(family, messages, reason):
    tokenizer = family_tokenizer(family)
    with pytest.raises(ConfigError, match=reason + ".*or --loss-on last, which trains the last turn of every row"):
        learned(messages, tokenizer)
    assert learned(messages, tokenizer, "last").endswith(("<|im_end|>", "<|return|>"))


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
@pytest.mark.parametrize("family", ["deepseekv3", "nemotron_3_nano"])
def test_a_template_that_opens_a_thought_only_where_it_asks_is_refused_with_both_texts(family, loss_on):
    with pytest.raises(
        ConfigError, match=r"asks for an answer with '.*<think>\\n', and writes .* as '.*Two"
    ) as refused:
        learned(TWO_TURNS[:2], family_tokenizer(family), loss_on)
    assert "--loss-on last" not in str(refused.value)
    assert learned(TWO_TURNS[:2], family_tokenizer(family), "all")


def test_a_conversation_that_the_template_refuses_as_a_whole_is_refused_with_its_own_words():
    with pytest.raises(
        ConfigError, match="line 7: the model's chat template refuses it: Conversation roles"
    ) as refused:
        learned(GREETED, family_tokenizer("gemma3"))
    assert "--loss-on" not in str(refused.value)


def test_marks_are_those_of_the_template_that_the_tools_choose():
    """Of a tokenizer with several templates, only the one for tools has marks here."""
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    marked += "{% else %}{{ m.content }}{% endif %}<end_of_turn>{% endfor %}"
    tokenizer = copy.deepcopy(family_tokenizer("gemma3"))
    plain = "{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": marked}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for tools, text in (((), "Two<end_of_turn>"), ((tool,), "Two")):
        encoded = encode_conversation((QUESTION, ANSWER), tokenizer, turns=[1], tools=tools)
        assert tokenizer.decode(encoded.token_ids[encoded.is_completion]) == text
