"""Test where the samples of reward models are read: at the last token that is no padding, and after each step."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coati_rl.batching.packing import pack
from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Pair, Steps
from coati_rl.reading.reward_samples import (
    label_token_ids,
    padding_token_id,
    prm_samples,
    process_sample,
    reward_pair,
    rm_samples,
)

PAD, MARK = 0, 9
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"

LABELS = ("+", "-")  # tokens of a right and of a wrong step


class Tokenizer:
    def __init__(self, pad: int | None, eos: int | None) -> None:
        self.pad_token_id, self.eos_token_id = pad, eos


def test_a_pair_is_read_at_the_last_token_of_each_response() -> None:
    chosen, rejected = reward_pair("row-0", [5, 6], [7, 8], [7], pad_token_id=PAD, margin=0.5)
    assert chosen.prefix_ids is rejected.prefix_ids
    assert (chosen.token_ids.tolist(), rejected.token_ids.tolist()) == ([7, 8, PAD], [7, PAD])
    assert (chosen.loss_mask.tolist(), rejected.loss_mask.tolist()) == ([False, False, True], [False, True])
    assert chosen.arrays == {"loss_weights": 1.0, "temperature": 1.0, "margin": 0.5}
    (micro_batch,) = pack([chosen, rejected], max_samples=2, unit=2)[0]
    assert micro_batch.token_ids.tolist() == [[5, 6, 7, 8, PAD, 5, 6, 7, PAD]]
    assert micro_batch.loss_arrays["sources"].tolist() == [[3, 7]]
    assert micro_batch.loss_arrays["margin"].tolist() == [[0.5, 0.5]]


def test_padding_at_the_end_of_a_response_is_not_read_as_transformers_does_not() -> None:
    """As where the end-of-sequence token is the padding token."""
    chosen, _ = reward_pair("row-0", [5], [7, PAD, 8, PAD, PAD], [7], pad_token_id=PAD)
    assert chosen.token_ids.tolist() == [7, PAD, 8, PAD]
    assert np.flatnonzero(chosen.loss_mask).tolist() == [3]


def test_a_response_without_a_token_to_read_at_is_refused() -> None:
    for response in ([], [PAD, PAD]):
        with pytest.raises(ValueError, match="row-3, response 1: it has no token"):
            reward_pair("row-3", [5], [7], response, pad_token_id=PAD)


def test_the_padding_token_is_the_tokenizers_own_or_its_end_of_sequence() -> None:
    assert padding_token_id(Tokenizer(pad=3, eos=2)) == 3
    assert padding_token_id(Tokenizer(pad=None, eos=2)) == 2
    with pytest.raises(ConfigError, match="pad_token"):
        padding_token_id(Tokenizer(pad=None, eos=None))


def test_each_step_is_read_at_its_placeholder() -> None:
    token_ids = [1, 2, 3, MARK, 4, 5, MARK]
    sample = process_sample("row-0", token_ids, [1.0, 0.25], places=[3, 6])
    assert sample.token_ids.tolist() == [*token_ids, MARK]  # one more, as a loss token follows the place it is read at
    assert np.flatnonzero(sample.loss_mask).tolist() == [4, 7]
    assert sample.arrays["step_label"].tolist() == [1.0, 0.25]
    (micro_batch,) = pack([sample], max_samples=1)[0]
    assert micro_batch.token_ids[0, micro_batch.loss_arrays["sources"][0]].tolist() == [MARK, MARK]


def test_a_text_that_was_cut_keeps_the_labels_of_the_steps_that_are_left() -> None:
    sample = process_sample("row-0", [1, MARK, 4], [0.0, 1.0], places=[1])
    assert sample.token_ids.tolist() == [1, MARK, 4]
    assert sample.arrays["step_label"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("places", "labels", "message"),
    [
        ([], [1.0], "0 placeholder tokens, 1 labels"),
        ([1, 3], [1.0], "2 placeholder tokens, 1 labels"),
        ([1], [1.5], r"must be in \[0, 1\]"),
    ],
)
def test_steps_and_labels_that_do_not_fit_are_refused(places: list[int], labels: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"row-4: .*{message}"):
        process_sample("row-4", [1, MARK, 2, MARK], labels, places=places)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokens = ["<p>", "<s>", "<e>", "!", "+", "-", *"abcdefgh"]
    plain = PlainTokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<p>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<e>",
        pad_token="<p>",
        unk_token="<p>",
        additional_special_tokens=["<s>"],
        chat_template=TEMPLATE,
    )


def turn(role: str, content: str) -> tuple[dict[str, str]]:
    return ({"role": role, "content": content},)


def text_of(sample, tokenizer) -> str:
    return "".join(tokenizer.convert_ids_to_tokens([*sample.prefix_ids, *sample.token_ids]))


def test_pairs_of_messages_and_of_text_are_read_after_their_end_with_their_margin(tokenizer) -> None:
    talk = Pair(prompt=turn("user", "a"), chosen=turn("assistant", "bc"), rejected=turn("assistant", "d"), margin=2.0)
    text = Pair(prompt="a", chosen="b", rejected="cd")
    made = rm_samples([talk, text], tokenizer, max_length=20)
    assert [text_of(sample, tokenizer) for sample in made.samples] == [
        "<s>a<e><s>bc<e><p>",
        "<s>a<e><s>d<e><p>",
        "ab<e><p>",
        "acd<e><p>",
    ]
    assert [sample.arrays["margin"] for sample in made.samples] == [2.0, 2.0, 0.0, 0.0]
    assert all(sample.loss_mask.tolist() == [False] * (len(sample.token_ids) - 1) + [True] for sample in made.samples)
    assert (made.rows, made.num_cut, made.num_left_out) == ((0, 1), 0, 0)


def test_long_pairs_are_cut_to_leave_room_for_the_padding_token_and_counted(tokenizer) -> None:
    pairs = [Pair(prompt="a", chosen="bcdef", rejected="g"), Pair(prompt="abcdefgh", chosen="a", rejected="b")]
    made = rm_samples(pairs, tokenizer, max_length=5)
    assert [text_of(sample, tokenizer) for sample in made.samples] == ["abcd<p>", "ag<e><p>"]
    assert (made.rows, made.num_cut, made.num_left_out) == ((0,), 1, 1)


def test_where_padding_ends_a_sequence_the_completion_is_read_before_it(tokenizer) -> None:
    tokenizer.pad_token = "<e>"
    (chosen, _) = rm_samples([Pair(prompt="a", chosen="b", rejected="c")], tokenizer, max_length=9).samples
    assert text_of(chosen, tokenizer) == "ab<e>"
    assert chosen.loss_mask.tolist() == [False, True]


def test_steps_of_a_list_and_of_one_text_get_a_placeholder_each(tokenizer) -> None:
    listed = Steps(prompt=turn("user", "a"), steps=("bc", "d"), labels=(1.0, 0.0))
    marked = Steps(prompt="", steps=("ab", "c"), labels=(0.5, 1.0))
    made = prm_samples([listed, marked], tokenizer, max_length=20, placeholder="!", reward_tokens=LABELS)
    assert [text_of(sample, tokenizer) for sample in made.samples] == ["<s>a<e><s>bc!d!!", "ab!c!!"]
    assert [sample.arrays["step_label"].tolist() for sample in made.samples] == [[1.0, 0.0], [0.5, 1.0]]


@pytest.mark.parametrize(
    ("max_length", "text", "loss_tokens", "labels"),
    [
        (12, "<s>a!!<e><s>b!!c!!", [9, 11], [1.0, 0.0]),
        (11, "<s>a!!<e><s>b!!c", [9], [1.0]),
        (10, "<s>a!!<e><s>b!!!", [9], [1.0]),
    ],
)
def test_a_placeholder_within_prompt_template_or_step_of_a_list_has_no_label(
    tokenizer, max_length: int, text: str, loss_tokens: list[int], labels: list[float]
) -> None:
    tokenizer.chat_template = TEMPLATE.replace("<e>", "!<e>")
    listed = Steps(prompt=turn("user", "a!"), steps=("b!", "c"), labels=(1.0, 0.0))
    (sample,) = prm_samples([listed], tokenizer, max_length=max_length, placeholder="!", reward_tokens=LABELS).samples
    assert text_of(sample, tokenizer) == text
    assert np.flatnonzero(sample.loss_mask).tolist() == loss_tokens
    assert sample.arrays["step_label"].tolist() == labels
    for shorter in (9, 5):  # no placeholder after a step is left, three and two others are
        made = prm_samples([listed], tokenizer, max_length=shorter, placeholder="!", reward_tokens=LABELS)
        assert (made.samples, made.num_left_out) == ((), 1)


def test_a_solution_that_is_cut_keeps_whole_steps_and_one_without_any_is_left_out(tokenizer) -> None:
    forms = [
        Steps(prompt="", steps=("ab", "cdefg"), labels=(0.0, 1.0)),
        Steps(prompt="", steps=("abcdef",), labels=(1.0,)),
    ]
    made = prm_samples(forms, tokenizer, max_length=6, placeholder="!", reward_tokens=LABELS)
    assert [text_of(sample, tokenizer) for sample in made.samples] == ["ab!cd"]
    assert made.samples[0].arrays["step_label"].tolist() == [0.0]
    assert (made.rows, made.num_cut, made.num_left_out) == ((0,), 1, 1)


def test_a_placeholder_or_label_that_is_no_token_is_refused(tokenizer) -> None:
    assert label_token_ids(tokenizer, ["+", "-"]) == (4, 5)
    for text in ("ab", "?"):
        with pytest.raises(ConfigError, match=rf"--placeholder-token '{re.escape(text)}' is .* one token"):
            prm_samples([], tokenizer, max_length=9, placeholder=text, reward_tokens=LABELS)
        with pytest.raises(ConfigError, match="--reward-tokens"):
            label_token_ids(tokenizer, ["+", text])
        with pytest.raises(ConfigError, match="--reward-tokens"):
            prm_samples([], tokenizer, max_length=9, placeholder="!", reward_tokens=["+", text])


@pytest.mark.parametrize("max_length", [9, 3], ids=["whole", "cut"])
def test_a_text_with_another_number_of_placeholders_than_labels_is_refused(tokenizer, max_length: int) -> None:
    form = Steps(prompt="", steps=("a!b", "c"), labels=(1.0, 1.0), where="--dataset a.jsonl, line 7")
    told = "--dataset a.jsonl, line 7: its input has '!' 3 times as a token, and 2 labels; use .* --placeholder-token"
    with pytest.raises(ConfigError, match=told):
        prm_samples([form], tokenizer, max_length=max_length, placeholder="!", reward_tokens=LABELS)
