"""Test the forms of rows as RL2, OpenRLHF and TRL print them, and the refusal of rows that are none."""

import json

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Conversation, Labelled, Pair, Steps, Text
from coati_rl.reading.row_formats import Columns, read_forms


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


ASKED, BLUE, GREEN = (user("What color is the sky?"),), (assistant("It is blue."),), (assistant("It is green."),)
SUM = (user("1?"), assistant("2"))
QUESTIONS = {"prompt": "question", "completion": "response"}  # OpenRLHF's --input_key question --output_key response
PLAIN = {"input_template": "{}"}  # text as it stands, as TRL takes it
SCORES = {"prompt": "instruction", "completion": "response", "label": "score"}
WHERE = "--dataset a.jsonl, line 7"
TALK = ({"role": "system", "content": "Be brief."}, user("1?"), assistant("2"), user("3?"), assistant("4"))


def forms_of(job, *rows, **columns):
    return read_forms([(WHERE, row) for row in rows], job, Columns(**columns)).forms


def refusal(job, row, **columns):
    with pytest.raises(ConfigError) as caught:
        forms_of(job, row, **columns)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value).removeprefix(f"{WHERE}: ")


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"messages": [*ASKED, *BLUE]}, {}, (*ASKED, *BLUE)),  # RL2 and TRL
        ({"prompt": [*ASKED], "completion": [*BLUE]}, {}, (*ASKED, *BLUE)),  # TRL
        ({"prompt": "1?", "completion": "2"}, {}, SUM),
        ({"question": "1?", "response": "2"}, QUESTIONS, SUM),
        ({"input_key": [*ASKED, *BLUE]}, {"prompt": "input_key"}, (*ASKED, *BLUE)),  # OpenRLHF
        ({"talk": [*ASKED], "said": BLUE[0]}, {"prompt": "talk", "completion": "said"}, (*ASKED, *BLUE)),
        ({"messages": json.dumps(SUM)}, {}, SUM),  # CSV
        ({"messages": [{**user("1?"), "name": None}, assistant("2")]}, {}, SUM),
    ],
)  # fmt: skip
def test_conversations_of_supervised_fine_tuning(row, columns, messages):
    assert forms_of("sft", row, **columns) == (Conversation(messages=messages, where=WHERE),)


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "text"),
    [
        ({"text": "The sky is blue."}, {}, "", "The sky is blue."),
        ({"body": "The sky is blue."}, {"prompt": "body"}, "", "The sky is blue."),
        ({"prompt": "The sky is", "completion": " blue."}, PLAIN, "The sky is", " blue."),
        ({"question": "{x}?", "response": "2"}, {**QUESTIONS, "input_template": "Q: {}\nA: "}, "Q: {x}?\nA: ", "2"),
    ],
)  # fmt: skip
def test_plain_text_of_supervised_fine_tuning(row, columns, prompt, text):
    assert forms_of("sft", row, **columns) == (Text(prompt=prompt, text=text, where=WHERE),)


def test_a_conversation_brings_its_tools_and_calls_without_content():
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "on", "arguments": {}}}]}
    (form,) = forms_of("sft", {"messages": [*ASKED, call], "tools": [{"type": "function"}]})
    assert (form.messages[1], form.tools) == (call, ({"type": "function"},))


@pytest.mark.parametrize("job", ["rm", "dpo"])
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [*ASKED], "chosen": "It is blue.", "rejected": "It is green."}, {}),  # RL2
        ({"prompt": [*ASKED], "chosen": [*BLUE], "rejected": [*GREEN]}, {}),  # TRL
        ({"chosen": [*ASKED, *BLUE], "rejected": [*ASKED, *GREEN]}, {}),  # TRL and OpenRLHF
        ({"good": [*ASKED, *BLUE], "bad": [*ASKED, *GREEN]}, {"chosen": "good", "rejected": "bad"}),
        ({"q": "What color is the sky?", "chosen": "It is blue.", "rejected": "It is green."}, {"prompt": "q"}),
        ({"prompt": "What color is the sky?", "chosen": [*ASKED, *BLUE], "rejected": [*ASKED, *GREEN]}, {}),
        ({"prompt": [*ASKED], "chosen": [*ASKED, *BLUE], "rejected": [*ASKED, *GREEN]}, {}),
        ({"prompt": "What color is the sky?", "chosen": [*BLUE], "rejected": [*GREEN]}, {}),
    ],
)
def test_pairs_of_messages(job, row, columns):
    assert forms_of(job, row, **columns) == (Pair(prompt=ASKED, chosen=BLUE, rejected=GREEN, where=WHERE),)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    ],
)
def test_pairs_of_plain_text(row):
    pair = Pair(prompt="The sky is", chosen=" blue.", rejected=" green.", where=WHERE)
    assert forms_of("dpo", row, **PLAIN) == (pair,)


def test_a_text_that_the_other_begins_with_keeps_a_completion():
    (pair,) = forms_of("dpo", {"chosen": "yes sir", "rejected": "yes"})
    assert (pair.prompt, pair.chosen, pair.rejected) == ("", "yes sir", "yes")


@pytest.mark.parametrize(
    ("one", "other", "prompt"),
    [
        ("It costs 12 dollars.", "It costs 125 dollars.", "It costs"),
        ("It costs 12", "It costs 125", "It costs"),
        ("It costs 12", "It costs 12 dollars.", "It costs"),
        ("It costs 12 ", "It costs 12 dollars.", "It costs 12"),
        ("Yes", "No", ""),
        (" Yes", " No", ""),
        ("12 dollars", "125", ""),
        ("So:  yes", "So:  no", "So: "),
        ("So:  yes", "So: no", "So:"),
        ("So:\n\nyes", "So:\n\nno", "So:\n"),
        ("So\nyes", "So no", "So"),
        ("So\nyes", "Sooner", ""),
    ],
)
def test_a_prompt_that_two_texts_begin_with_ends_inside_a_word_of_neither(one, other, prompt):
    (pair,) = forms_of("dpo", {"chosen": one, "rejected": other})
    (turned,) = forms_of("dpo", {"chosen": other, "rejected": one})
    assert pair == Pair(prompt=prompt, chosen=one[len(prompt) :], rejected=other[len(prompt) :], where=WHERE)
    assert (turned.prompt, turned.chosen, turned.rejected) == (pair.prompt, pair.rejected, pair.chosen)


def test_turns_that_both_conversations_begin_with_are_the_prompt():
    (pair,) = forms_of("dpo", {"chosen": [*TALK], "rejected": [*TALK[:4], assistant("5")]})
    assert (pair.prompt, pair.chosen, pair.rejected) == (TALK[:4], TALK[4:], (assistant("5"),))


@pytest.mark.parametrize(("margin", "read"), [(2, 2.0), ("0.5", 0.5), (None, 0.0), ("", 0.0)])
def test_a_margin_is_a_number(margin, read):
    row = {"messages": [*ASKED], "chosen": "a", "rejected": "b", "margin": margin}
    assert forms_of("rm", row)[0].margin == read


@pytest.mark.parametrize(
    ("row", "columns", "form"),
    [
        ({"prompt": [*ASKED], "completion": [*GREEN], "label": False}, {}, (ASKED, GREEN, False)),
        ({"prompt": "A sky is", "completion": " blue.", "label": True}, PLAIN, ("A sky is", " blue.", True)),
        ({"instruction": "1?", "response": "2", "score": 1}, SCORES, (SUM[:1], SUM[1:], True)),
        ({"completion": [*ASKED, *BLUE], "label": 1.0}, {}, (ASKED, BLUE, True)),
        ({"messages": [*ASKED], "completion": "It is blue.", "label": "False"}, {}, (ASKED, BLUE, False)),
    ],
)
def test_labelled_completions(row, columns, form):
    (made,) = forms_of("kto", row, **columns)
    assert (made.prompt, made.completion, made.label) == form


def test_a_pair_is_a_desirable_and_an_undesirable_completion():
    row = {"prompt": [*ASKED], "chosen": [*BLUE], "rejected": [*GREEN]}
    assert forms_of("kto", row) == (
        Labelled(prompt=ASKED, completion=BLUE, label=True, where=WHERE),
        Labelled(prompt=ASKED, completion=GREEN, label=False, where=WHERE),
    )


@pytest.mark.parametrize("label", [2, 0.5, "yes", "", [True], -1])
def test_a_label_that_is_not_boolean_is_refused(label):
    message = refusal("kto", {"prompt": "a", "completion": "b", "label": label})
    assert message == f"its label is {label!r}; write true or false (or 1 or 0)"


def test_steps_with_labels():
    row = {"prompt": "9.8 or 9.11?", "completions": ["0.8.", "0.11.", "0.11 > 0.8."], "labels": [True, True, False]}
    steps = {"steps": ("0.8.", "0.11.", "0.11 > 0.8."), "labels": (1.0, 1.0, 0.0), "where": WHERE}
    assert forms_of("prm", row) == (Steps(prompt=(user("9.8 or 9.11?"),), **steps),)
    assert forms_of("prm", row, **PLAIN) == (Steps(prompt="9.8 or 9.11?", **steps),)


@pytest.mark.parametrize("labels", [["+", "-"], [1, 0], [True, False], ["1", "false"]])
def test_a_text_with_a_mark_after_each_step(labels):
    row = {"input": "1+1? Step 1: 2 ки\nStep 2: 3 ки\n", "value": labels}
    (form,) = forms_of("prm", row, prompt="input", label="value", step_token="ки")
    assert form == Steps(prompt="", steps=("1+1? Step 1: 2 ", "\nStep 2: 3 "), labels=(1.0, 0.0), where=WHERE)


def test_labels_of_steps_may_lie_between_wrong_and_right():
    row = {"prompt": "a", "completions": ["b", "c"], "labels": [0.25, 1]}
    assert forms_of("prm", row)[0].labels == (0.25, 1.0)
    assert "label 1 is 1.5; write a number from 0" in refusal("prm", {**row, "labels": [1.5, 0]})


def test_equal_pairs_are_left_out_and_counted():
    good = {"messages": [*ASKED], "chosen": "a", "rejected": "b"}
    made = read_forms([(WHERE, good), (WHERE, {**good, "rejected": "a"}), (WHERE, good)], "dpo")
    assert (len(made.forms), made.num_equal) == (2, 1)
    whole = {"chosen": [*ASKED, *BLUE], "rejected": [*ASKED, *BLUE]}
    assert read_forms([(WHERE, whole), (WHERE, {"chosen": "x", "rejected": "x"})], "kto").num_equal == 2


@pytest.mark.parametrize(
    ("job", "row", "columns", "message"),
    [
        ("dpo", {"messages": [*ASKED], "chosen": " ", "rejected": "b"}, {}, "its chosen is empty"),
        ("dpo", {"messages": [*ASKED], "chosen": "a", "rejected": [assistant("")]}, {}, "its rejected is empty"),
        ("dpo", {"messages": [*ASKED], "chosen": "a", "rejected": [*GREEN]}, {}, "one of chosen and rejected is text"),
        ("dpo", {"chosen": [*SUM], "rejected": [*ASKED, *BLUE]}, {}, "chosen and rejected differ before"),
        ("dpo", {"prompt": "a", "chosen": 1, "rejected": "b"}, {}, "chosen is int; write text"),
        ("rm", {"prompt": "a", "chosen": "x", "rejected": "b", "margin": "wide"}, {}, "its margin is 'wide'"),
        ("sft", {"messages": [*ASKED]}, {}, "no message has the role assistant"),
        ("sft", {"messages": "hello"}, {}, "messages is str"),
        ("sft", {"messages": [{"role": "user"}, *BLUE]}, {}, "messages, message 1 is not"),
        ("sft", {"prompt": "a", "completion": ""}, {}, "its completion is empty"),
        ("sft", {"text": " "}, {}, "its text is empty"),
        ("sft", [1], {}, "is list; write an object with messages"),
        ("sft", {"a": 1}, {"prompt": "question"}, "has no question (--prompt-key); its columns are a"),
        ("prm", {"prompt": "a", "completions": ["b", "c"], "labels": [1]}, {}, "has 2 steps and 1 labels"),
        ("prm", {"prompt": "a", "completions": ["b", " "], "labels": [1, 1]}, {}, "completions is no list of texts"),
        ("prm", {"input": "a ки b", "label": ["+"]}, {"step_token": "ки"}, "its last step does not end with 'ки'"),
        ("prm", {"input": "a ки", "label": ["+"]}, {}, "is one text of all steps; name the text after each step"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_row(job, row, columns, message):
    assert refusal(job, row, **columns).startswith(message)


@pytest.mark.parametrize(
    ("job", "row", "nearest", "missing", "other"),
    [
        ("dpo", "prompt chosen", "prompt, chosen, rejected", "rejected", ""),
        ("kto", "prompt completion", "prompt, completion, label", "label", ", or give it to coati-rl sft"),
        ("sft", "prompt chosen rejected", "prompt, completion", "output", ", or give it to coati-rl rm"),
        ("prm", "completions labels", "prompt, completions, labels", "prompt", ""),
    ],
)
def test_a_row_in_no_format_of_its_job_is_refused_with_the_nearest(job, row, nearest, missing, other):
    column = {"output": "completion"}.get(missing, missing)
    assert refusal(job, dict.fromkeys(row.split(), "a")) == (
        f"has {', '.join(row.split())}, which is no row of coati-rl {job}; the nearest format is {nearest}, and "
        f"{column} is missing; name it with --{missing}-key COLUMN{other} (docs/data_formats.md)"
    )


def test_a_row_without_columns_is_refused_too():
    assert "has no columns, which is no row of coati-rl sft; the nearest format is messages" in refusal("sft", {})
