"""Test that the loss tokens of conversations are the assistant's turns, each up to the token that ends it."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coati_rl.data.conversations import make_conversations
from coati_rl.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
ONLY_THE_LAST_THOUGHT = (  # earlier turns lose what stands in brackets, as thoughts do in some templates
    "{% for m in messages %}<s>{{ m['role'][0] }}"
    "{{ m['content'] if loop.last else m['content'].replace('[', '').replace(']', '') }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token a character."""
    tokens = ["<p>", "<s>", "<e>", *"abcdefghijklmnopqrstuvwxyz?[]\n"]
    plain = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<e>", additional_special_tokens=["<s>"], chat_template=TEMPLATE
    )


def turn(role, content):
    return {"role": role, "content": content}


def learned(sample, tokenizer):
    """The loss tokens as text."""
    return "".join(tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask].tolist()))


def test_the_assistants_turn_is_learned_up_to_its_end_and_nothing_else(tokenizer):
    ((sample,), refused) = _made([[turn("user", "hi?"), turn("assistant", "yo")]], tokenizer)
    assert tokenizer.convert_ids_to_tokens(sample.token_ids.tolist()) == [
        *["<s>", *"uhi?", "<e>", "\n"],
        *["<s>", *"ayo", "<e>", "\n"],
    ]
    assert learned(sample, tokenizer) == "yo<e>"
    assert refused == 0


def test_every_turn_of_the_assistants_is_learned_given_what_came_before(tokenizer):
    talk = [
        turn("system", "be"),
        turn("user", "one"),
        turn("assistant", "two"),
        turn("user", "x"),
        turn("assistant", "y"),
    ]
    ((sample,), _) = _made([talk], tokenizer)
    assert learned(sample, tokenizer) == "two<e>y<e>"
    assert len(sample) == len("sbe") + len("uone") + len("atwo") + len("ux") + len("ay") + 3 * 5


def test_longer_conversations_are_left_out_and_counted(tokenizer):
    short, long = [turn("user", "a"), turn("assistant", "b")], [turn("user", "a" * 50), turn("assistant", "b")]
    samples, refused = _made([short, long, short], tokenizer, max_tokens=20)
    assert ([sample.uid for sample in samples], refused) == (["row-0", "row-2"], 1)


def test_a_row_without_an_answer_is_refused_by_its_number(tokenizer):
    with pytest.raises(ConfigError, match="--dataset, row 2: no message has the role assistant"):
        _made([[turn("user", "a"), turn("assistant", "b")], [turn("user", "a")]], tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = ONLY_THE_LAST_THOUGHT
    talk = [turn("user", "a"), turn("assistant", "[hm]b"), turn("user", "c"), turn("assistant", "d")]
    with pytest.raises(ConfigError, match="row 1: the model's chat template changes earlier messages"):
        _made([talk], tokenizer)


def _made(conversations, tokenizer, max_tokens=100):
    made = make_conversations(conversations, tokenizer, max_tokens=max_tokens)
    return made.samples, made.num_refused
