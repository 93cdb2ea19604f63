"""Messages as other systems and formats write them: nulls, parts, ShareGPT, arguments as text, weights, variables."""

import json
from copy import copy

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.chat_template import apply_chat_template
from coati_rl.reading.forms import Conversation
from coati_rl.reading.offline_samples import kto_samples, pair_samples, sft_samples
from coati_rl.reading.reward_samples import prm_samples, rm_samples
from coati_rl.reading.row_formats import read_forms
from coati_rl.reading.row_messages import plain_messages

WHERE = "-d a.jsonl, line 7"
CALLS = "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
TEMPLATE = (
    "{{ 'quiet ' if quiet }}{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}" + CALLS + "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEXT_ALONE = TEMPLATE.replace(
    CALLS, "{% for call in message.tool_calls or [] %}{{ '' + call.function.arguments }}{% endfor %}"
)
HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


@pytest.fixture(scope="module")
def render(tokenizer):
    """A tokenizer with a template that reads tools, calls and the variable `quiet`."""

    def make(template=TEMPLATE):
        made = copy(tokenizer)
        made.chat_template = template
        return made

    return make


def plain(*messages):
    return plain_messages(messages, "messages", WHERE)


def refusal(function, *values):
    with pytest.raises(ConfigError) as caught:
        function(*values)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value).removeprefix(f"{WHERE}: ")


def forms_of(job, row):
    return read_forms([(WHERE, row)], job).forms


def calling(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def trained(tokenizer, row, **options):
    (sample,) = sft_samples(forms_of("sft", row), tokenizer, max_length=1000, **options).samples
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


def test_a_null_beside_other_keys_is_no_key_and_a_null_in_a_list_or_in_text_stays():
    arguments = {"x": None, "y": {"z": None, "list": [None, {"a": None}]}}
    (message,) = plain(calling(arguments) | {"name": None})
    assert message == calling({"y": {"list": [None, {}]}})
    assert plain(calling('{"x": null}')) == [calling('{"x": null}')]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a", "weight": 0}, {"role": "assistant", "content": "a", "weight": 0}),
        ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        ({"from": "tool", "value": [{"type": "text", "text": "a"}]}, {"role": "tool", "content": "a"}),
        (
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},  # as coati-rl serve joins them
        ),
    ],
)
def test_turns_of_sharegpt_and_text_parts_become_messages(turn, message):
    assert plain(turn) == [message]


@pytest.mark.parametrize(
    ("turn", "cause"),
    [
        ({"from": "alice", "value": "a"}, "messages, message 2 is from 'alice'; write one of human, gpt"),
        ({"from": "function_call", "value": "f(1)"}, "messages, message 2 is no call; write JSON text of"),
        ({"from": "human"}, 'messages, message 2 is not {"role": ..., "content": text}'),
        ({"role": "user", "content": [{"type": "image"}]}, "messages, message 2 has a part of type image; models"),
        ({"role": "user", "content": ["a"]}, "messages, message 2 has a part of type str; models here read text"),
        ({**YO, "weight": 0.5}, "messages, message 2 has the weight 0.5; write 1, or 0 for a turn that is not"),
        ({**YO, "weight": "0"}, "messages, message 2 has the weight '0'; write 1, or 0"),
        (calling('{"x": "\\ud83d"}'), r"messages, message 2: the text of arguments x holds \ud83d, half of a"),
        (calling('{"x": ' + "7" * 5000 + "}"), "messages, message 2: the text of arguments holds an integer of"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(turn, cause):
    assert refusal(plain, HI, turn).startswith(cause)


def test_messages_that_are_json_text_are_checked_as_rows_are():
    half = json.dumps([HI, {**YO, "content": "bad \ud83d"}])
    assert refusal(forms_of, "sft", {"messages": half}).startswith(r"messages holds \ud83d, half of a surrogate pair")
    deep = '[{"role": "user", "content": "", "x": ' + "[" * 200 + "]" * 200 + "}]"
    assert refusal(forms_of, "sft", {"messages": deep}) == "messages is nested more than 100 deep; write what is " + (
        "deeper as text"
    )


@pytest.mark.parametrize("arguments", [{"city": "Ås"}, '{"city": "Ås"}', '{"city":"\\u00c5s"}'])
def test_arguments_are_written_once_whether_they_are_an_object_or_its_text(render, arguments):
    row = {"messages": [HI, calling(arguments)]}
    assert trained(render(), row) == '{"city": "Ås"}\n'


@pytest.mark.parametrize(("arguments", "text"), [("", "{}"), ("no JSON", '"no JSON"'), ("[1]", '"[1]"')])
def test_arguments_that_are_no_object_stay_text_and_none_are_an_empty_object(render, arguments, text):
    assert trained(render(), {"messages": [HI, calling(arguments)]}) == f"{text}\n"


@pytest.mark.parametrize("arguments", [{"city": "Oslo", "n": 1}, '{"city": "Oslo", "n": 1}'])
def test_a_template_that_takes_text_alone_gets_text(render, arguments):
    assert trained(render(TEXT_ALONE), {"messages": [HI, calling(arguments)]}) == '{"city": "Oslo", "n": 1}\n'


def test_text_for_a_template_that_takes_text_alone_is_as_it_was_written(render):
    assert trained(render(TEXT_ALONE), {"messages": [HI, calling('{"a":1}')]}) == '{"a":1}\n'


def test_a_template_that_takes_neither_is_named_with_its_first_refusal(render):
    refusing = render("{{ messages[0].tool_calls[0].function.arguments.city.nothing.at_all }}")
    assert refusal(apply_chat_template, refusing, [calling("{}")], WHERE).endswith(
        "'dict object' has no attribute 'city'"
    )


TALK = [HI, {**YO, "weight": 0}, HI, {"role": "assistant", "content": "So", "weight": 1}, HI, {**YO, "weight": 0.0}]


@pytest.mark.parametrize(
    ("loss_on", "text"),
    [("assistant", "So\n"), ("last", "So\n"), ("all", ":Hi\na:u:Hi\na:So\nu:Hi\na:")],
)
def test_a_turn_of_weight_0_is_read_and_not_trained(render, loss_on, text):
    assert trained(render(), {"messages": TALK}, loss_on=loss_on) == text


def test_turns_of_weight_0_of_completions_are_not_trained_either(render):
    row = {"messages": [HI], "chosen": TALK[1:4], "rejected": [YO]}
    tokenizer = render()
    chosen, _ = pair_samples(forms_of("dpo", row), tokenizer, max_length=1000).samples
    assert tokenizer.decode(chosen.token_ids[chosen.loss_mask]) == "So\n"


def test_a_row_whose_turns_all_have_weight_0_is_left_out_and_counted(render):
    forms = forms_of("sft", {"messages": [HI, {**YO, "weight": 0}]})
    made = sft_samples(forms, render(), max_length=1000)
    assert (len(made.samples), made.num_left_out) == (0, 1)


OWN = {"from": "system", "value": "Own."}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": SHAREGPT}, (HI, YO)),
        ({"conversations": [HI, YO]}, (HI, YO)),
        ({"conversations": json.dumps(SHAREGPT)}, (HI, YO)),
        ({"conversations": SHAREGPT, "messages": None}, (HI, YO)),
        ({"conversations": SHAREGPT, "messages": "", "system": ""}, (HI, YO)),  # CSV
        ({"conversations": SHAREGPT, "system": "Be."}, ({"role": "system", "content": "Be."}, HI, YO)),
        ({"conversations": [OWN, *SHAREGPT], "system": "Be."}, ({"role": "system", "content": "Own."}, HI, YO)),
        ({"conversations": SHAREGPT, "messages": [HI, {**YO, "content": "own"}]}, (HI, {**YO, "content": "own"})),
        ({"prompt": "", "completion": "", "messages": [HI, YO]}, (HI, YO)),
        ({"messages": "", "prompt": "Hi", "completion": "Yo"}, (HI, YO)),  # of a CSV whose rows have several formats
    ],
)  # fmt: skip
def test_conversations_stand_in_the_place_of_messages(row, messages):
    assert forms_of("sft", row) == (Conversation(messages=messages, where=WHERE),)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (SHAREGPT[1], {"from": "gpt", "value": "No"}),
        ("Yo", "No"),
        (YO, {**YO, "content": "No"}),
        (SHAREGPT, [SHAREGPT[0], {"from": "gpt", "value": "No"}]),  # whole conversations, whatever stands beside them
    ],
)
def test_pairs_of_sharegpt_are_read(chosen, rejected):
    row = {"conversations": SHAREGPT[:1], "chosen": chosen, "rejected": rejected}
    (pair,) = forms_of("dpo", row)
    assert (pair.prompt, pair.chosen, pair.rejected) == ((HI,), (YO,), ({"role": "assistant", "content": "No"},))


OPTIONS = [{"quiet": True, "x": None}, '{"quiet": true}']
TOOLS = [[{"name": "f", "strict": None}], '[{"name": "f"}]']


@pytest.mark.parametrize("options", OPTIONS, ids=["object", "text"])
@pytest.mark.parametrize("tools", TOOLS, ids=["list", "text"])
@pytest.mark.parametrize(
    ("job", "row", "make"),
    [
        ("sft", {"messages": [HI, YO]}, sft_samples),
        ("dpo", {"messages": [HI], "chosen": "Yo", "rejected": "No"}, pair_samples),
        ("rm", {"messages": [HI], "chosen": "Yo", "rejected": "No"}, rm_samples),
        ("kto", {"messages": [HI], "completion": "Yo", "label": True}, kto_samples),
        ("prm", {"prompt": [HI], "completions": ["Yo"], "labels": [1]}, prm_samples),
    ],
)
def test_tools_and_variables_of_a_row_go_to_the_chat_template_in_every_job(render, job, row, make, tools, options):
    tokenizer = render()
    forms = forms_of(job, {**row, "tools": tools, "chat_template_kwargs": options})
    if job == "kto":
        forms += forms_of(job, {**row, "messages": [{**HI, "content": "Ho"}]})
    given = {"placeholder": "|", "reward_tokens": ["Y", "o"]} if job == "prm" else {}
    sample = make(forms, tokenizer, max_length=1000, **given).samples[0]
    whole = [*sample.prefix_ids, *sample.token_ids]
    assert tokenizer.decode(whole).startswith("quiet f u:Hi\na:Yo")


@pytest.mark.parametrize(
    ("column", "value", "cause"),
    [
        ("chat_template_kwargs", [1], "chat_template_kwargs is list; write an object of the template's variables"),
        ("chat_template_kwargs", "quiet", "chat_template_kwargs is str; write an object"),
        ("chat_template_kwargs", '{"a": "\\ud83d"}', r"chat_template_kwargs holds \ud83d, half of a surrogate pair"),
        ("tools", "f", "tools is no list of JSON schemas"),
        ("tools", ["f"], "tools is no list of JSON schemas"),
    ],
)
def test_wrong_tools_and_variables_are_refused(column, value, cause):
    assert refusal(forms_of, "sft", {"messages": [HI, YO], column: value}).startswith(cause)


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "chat_template", "return_dict"])
def test_variables_may_not_be_what_the_tokenizer_takes_itself(render, name):
    forms = forms_of("sft", {"messages": [HI, YO], "chat_template_kwargs": {"quiet": True, name: False}})
    cause = refusal(lambda: sft_samples(forms, render(), max_length=1000))
    assert cause == f"chat_template_kwargs sets {name}, which is not the template's to read; leave it out"
