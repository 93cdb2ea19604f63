"""Test which tokens the samples of jobs on a dataset learn: turns up to the token that ends them, completions, all."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Conversation, Labelled, Pair, Text
from coati_rl.reading.offline_samples import kto_samples, pair_samples, sft_samples

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
ONLY_THE_LAST_THOUGHT = (  # earlier turns lose what stands in brackets, as thoughts do in some templates
    "{% for m in messages %}<s>{{ m['role'][0] }}"
    "{{ m['content'] if loop.last else m['content'].replace('[', '').replace(']', '') }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


MARKED = (  # the end of a turn is outside of the marks, which differs from what is found without them
    "{% for m in messages %}<s>{{ m['role'][0] }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token a character."""
    tokens = ["<p>", "<s>", "<e>", *"abcdefghijklmnopqrstuvwxyz?[] \n"]
    plain = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<e>", additional_special_tokens=["<s>"], chat_template=TEMPLATE
    )


@pytest.fixture
def merging():
    """Byte-level pairs in which `=4` and ` 4` are one token each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "=4", "Ġ4"])}
    pairs = Tokenizer(models.BPE(vocabulary, [("=", "4"), ("Ġ", "4")]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.add_special_tokens([AddedToken("<e>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<e>")


def turn(role, content):
    return {"role": role, "content": content}


def talk(*contents):
    """The user and the assistant, in turns."""
    return tuple(turn(("user", "assistant")[index % 2], content) for index, content in enumerate(contents))


def conversation(*contents, **fields):
    return Conversation(messages=talk(*contents), **fields)


def pair(prompt, chosen, rejected, **fields):
    return Pair(
        prompt=talk(prompt), chosen=(turn("assistant", chosen),), rejected=(turn("assistant", rejected),), **fields
    )


def labelled(prompt, completion, label):
    return Labelled(prompt=talk(prompt), completion=(turn("assistant", completion),), label=label)


def learned(sample, tokenizer):
    """The loss tokens as text."""
    return "".join(tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask].tolist()))


def whole(sample, tokenizer):
    """All tokens as text."""
    return "".join(tokenizer.convert_ids_to_tokens([*sample.prefix_ids.tolist(), *sample.token_ids.tolist()]))


def sft(tokenizer, *forms, max_length=100, **options):
    return sft_samples(forms, tokenizer, max_length=max_length, **options)


def test_the_assistants_turn_is_learned_up_to_its_end_and_nothing_else(tokenizer):
    (sample,) = sft(tokenizer, conversation("hi?", "yo")).samples
    assert whole(sample, tokenizer) == "<s>uhi?<e>\n<s>ayo<e>\n"
    assert learned(sample, tokenizer) == "yo<e>"
    assert (sample.uid, sample.number, sample.arrays) == ("row-0", 0, {"loss_weights": 1.0, "temperature": 1.0})


@pytest.mark.parametrize(
    ("loss_on", "text"),
    [("assistant", "two<e>y<e>"), ("last", "y<e>"), ("all", "sbe<e>\n<s>uone<e>\n<s>atwo<e>\n<s>ux<e>\n<s>ay<e>\n")],
)
def test_every_turn_of_the_assistants_is_learned_or_the_last_or_all_tokens_but_the_first(tokenizer, loss_on, text):
    form = Conversation(messages=(turn("system", "be"), *talk("one", "two", "x", "y")))
    (sample,) = sft(tokenizer, form, loss_on=loss_on).samples
    assert learned(sample, tokenizer) == text


@pytest.mark.parametrize(("loss_on", "text"), [("assistant", "twoy"), ("last", "y")])
def test_marks_of_the_template_decide_where_it_has_them(tokenizer, loss_on, text):
    tokenizer.chat_template = MARKED
    (sample,) = sft(tokenizer, conversation("one", "two", "x", "y"), loss_on=loss_on).samples
    assert whole(sample, tokenizer) == "<s>uone<e>\n<s>atwo<e>\n<s>ux<e>\n<s>ay<e>\n"
    assert learned(sample, tokenizer) == text


def test_longer_rows_are_cut_at_the_end_and_left_out_if_nothing_is_left_to_learn(tokenizer):
    long_answer, long_question = conversation("a", "b" * 30), conversation("a" * 30, "b")
    made = sft(tokenizer, conversation("a", "b"), long_question, long_answer, max_length=20)
    assert [sample.uid for sample in made.samples] == ["row-0", "row-2"]
    assert [len(sample) for sample in made.samples] == [10, 20]
    assert (made.rows, made.num_cut, made.num_left_out) == ((0, 2), 1, 1)


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_only_the_last_is_learned(tokenizer):
    tokenizer.chat_template = ONLY_THE_LAST_THOUGHT
    form = conversation("a", "[hm]b", "c", "[oh]d", where="--dataset a.jsonl, line 3")
    with pytest.raises(ConfigError, match="line 3: the model's chat template changes earlier messages"):
        sft(tokenizer, form)
    assert learned(sft(tokenizer, form, loss_on="last").samples[0], tokenizer) == "[oh]d<e>"


@pytest.mark.parametrize("failure", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_fails_is_refused_by_its_row(tokenizer, failure):
    tokenizer.chat_template = failure
    with pytest.raises(ConfigError, match="line 3: the model's chat template refuses it: "):
        sft(tokenizer, conversation("a", "b", where="--dataset a.jsonl, line 3"))


def test_plain_text_ends_with_the_end_of_the_sequence_and_is_learned_but_for_its_prompt(tokenizer):
    document, answer = sft(tokenizer, Text(text="abc"), Text(prompt="ab", text="cd")).samples
    assert (whole(document, tokenizer), learned(document, tokenizer)) == ("abc<e>", "bc<e>")
    assert (whole(answer, tokenizer), learned(answer, tokenizer)) == ("abcd<e>", "cd<e>")
    (every,) = sft(tokenizer, Text(prompt="ab", text="cd"), loss_on="all").samples
    assert learned(every, tokenizer) == "bcd<e>"


def test_plain_text_begins_as_the_tokenizer_begins_a_sequence(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    plain, begun = sft(tokenizer, Text(text="ab"), Text(text="<s>ab<e>")).samples
    assert (whole(plain, tokenizer), learned(plain, tokenizer)) == ("<s>ab<e>", "ab<e>")
    assert (whole(begun, tokenizer), learned(begun, tokenizer)) == ("<s>ab<e>", "ab<e>")


@pytest.mark.parametrize(("completion", "tokens"), [(" 4", ["Ġ4", "<e>"]), ("41", ["1", "<e>"]), ("4", ["=4", "<e>"])])
def test_text_is_tokenised_once_and_a_token_of_both_is_the_prompts_unless_it_is_all(merging, completion, tokens):
    (sample,) = sft(merging, Text(prompt="2+2=", text=completion)).samples
    assert sample.token_ids[:-1].tolist() == merging(f"2+2={completion}")["input_ids"]
    assert merging.convert_ids_to_tokens(sample.token_ids[sample.loss_mask].tolist()) == tokens


def test_pairs_are_consecutive_and_share_their_prompt(tokenizer):
    made = pair_samples([pair("q?", "yes", "no"), pair("r?", "a", "bcd")], tokenizer, max_length=100)
    assert [(sample.uid, sample.number) for sample in made.samples] == [(f"row-{i}", j) for i in (0, 1) for j in (0, 1)]
    assert [learned(sample, tokenizer) for sample in made.samples] == ["yes<e>", "no<e>", "a<e>", "bcd<e>"]
    chosen, rejected = made.samples[:2]
    assert chosen.prefix_ids is rejected.prefix_ids
    assert "".join(tokenizer.convert_ids_to_tokens(chosen.prefix_ids.tolist())) == "<s>uq?<e>\n<s>a"
    assert whole(rejected, tokenizer) == "<s>uq?<e>\n<s>ano<e>\n"
    assert chosen.arrays == {"loss_weights": 1.0, "temperature": 1.0}


def test_completions_that_begin_alike_are_learned_whole(tokenizer):
    chosen, rejected = pair_samples([pair("q", "same a", "same b")], tokenizer, max_length=100).samples
    assert (learned(chosen, tokenizer), learned(rejected, tokenizer)) == ("same a<e>", "same b<e>")


def test_earlier_turns_of_a_prompt_are_not_learned(tokenizer):
    form = Pair(prompt=talk("a", "b", "c"), chosen=(turn("assistant", "d"),), rejected=(turn("assistant", "e"),))
    for template in (TEMPLATE, MARKED):
        tokenizer.chat_template = template
        chosen, rejected = pair_samples([form], tokenizer, max_length=100).samples
        assert learned(chosen, tokenizer)[0] == "d" and learned(rejected, tokenizer)[0] == "e"


def test_a_prompt_ends_where_the_tokens_of_its_completions_part(merging):
    form = Pair(prompt="2+2=", chosen="41", rejected="5")
    chosen, rejected = pair_samples([form], merging, max_length=100).samples
    assert merging.convert_ids_to_tokens(chosen.prefix_ids.tolist()) == ["2", "+", "2"]
    assert merging.convert_ids_to_tokens(chosen.token_ids.tolist()) == ["=4", "1", "<e>"]
    assert merging.convert_ids_to_tokens(chosen.token_ids[chosen.loss_mask].tolist()) == ["1", "<e>"]
    assert merging.convert_ids_to_tokens(rejected.token_ids.tolist()) == ["=", "5", "<e>"]
    assert merging.convert_ids_to_tokens(rejected.token_ids[rejected.loss_mask].tolist()) == ["5", "<e>"]


def test_a_pair_is_cut_together_and_left_out_together(tokenizer):
    forms = [pair("q" * 30, "a", "b"), pair("q", "a" * 30, "b"), pair("q", "a", "b")]
    made = pair_samples(forms, tokenizer, max_length=20)
    assert [len(sample) for sample in made.samples] == [20, 10, 10, 10]
    assert (made.rows, made.num_cut, made.num_left_out) == ((1, 2), 1, 1)


def test_kto_compares_a_completion_with_that_of_the_next_row_with_another_prompt(tokenizer):
    forms = [labelled("p", "a", True), labelled("p", "b", False), labelled("q", "c", True), labelled("p", "d", False)]
    samples = kto_samples(forms, tokenizer, max_length=100).samples
    assert [learned(sample, tokenizer)[0] for sample in samples] == [*"ac", *"bc", *"cd", *"dc"]
    assert [sample.arrays["label"] for sample in samples] == [1.0, -1.0, 0.0, -1.0, 1.0, -1.0, 0.0, -1.0]
    assert all(own.prefix_ids is other.prefix_ids for own, other in zip(samples[::2], samples[1::2], strict=True))


def test_kto_of_one_prompt_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="all rows have the same prompt"):
        kto_samples([labelled("p", "a", True), labelled("p", "b", False)], tokenizer, max_length=100)


def test_kto_takes_text_beside_messages(tokenizer):
    text = Labelled(prompt="ab", completion="cd", label=True)
    samples = kto_samples([text, labelled("q", "e", False)], tokenizer, max_length=100).samples
    assert [whole(sample, tokenizer) for sample in samples] == [
        *("abcd<e>", "abe<e>"),
        *("<s>uq<e>\n<s>ae<e>\n", "<s>uq<e>\n<s>acd<e>\n"),
    ]
