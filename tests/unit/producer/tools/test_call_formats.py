"""Test the parsers of tool calls by hand: what is a call, what is content, and what is an error."""

import json

import pytest

from producer.tools.call_formats import FORMATS, ParsedAnswer
from producer.tools.tool import typed_arguments

GOOD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": None}]}}
WRITTEN = {  # the same call
    "hermes": f"<tool_call>\n{json.dumps(GOOD)}\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": null}]}}',
    "mistral": f"[TOOL_CALLS][{json.dumps(GOOD)}]",
    "pythonic": "[add(a=1, b=[2, {'c': None}])]",
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=b>\n[2, {"c": null}]\n</parameter>\n</function>\n</tool_call>',
}
SCHEMA = {"function": {"parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}}}


def parse(name: str, text: str) -> ParsedAnswer:
    return FORMATS[name].parse(text)


def calls(name: str, text: str) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in parse(name, text).calls]


def test_each_format_has_a_name_and_an_example() -> None:
    assert {name: one.name for name, one in FORMATS.items()} == {name: name for name in WRITTEN}


def test_a_text_is_read_as_one_of_the_types_that_its_parameter_may_have() -> None:
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}]}  # as an MCP server describes `int | None`
    schema = {"function": {"name": "f", "parameters": {"properties": {"a": optional, "b": optional, "c": optional}}}}
    assert typed_arguments(schema, {"a": "5", "b": "None", "c": "five"}) == {"a": 5, "b": None, "c": "five"}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_has_a_name_and_arguments_that_are_an_object(name: str) -> None:
    answer = parse(name, WRITTEN[name])
    assert [(call.name, typed_arguments(SCHEMA, call.arguments)) for call in answer.calls] == [
        ("add", GOOD["arguments"])
    ]
    assert (answer.content, answer.errors) == ("", ())
    (call,) = answer.message()["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": answer.calls[0].arguments}
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_without_calls_is_content(name: str) -> None:
    text = 'The result is {"a": [1]}, and f(x) = 2.\n'
    answer = parse(name, text)
    assert (answer.content, answer.calls, answer.errors) == (text, (), ())
    assert answer.message() == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_is_no_call(name: str) -> None:
    whole = WRITTEN[name]
    for end in range(whole.index("add") + 4, whole.rindex("}")):
        answer = parse(name, whole[:end])
        assert (answer.content, answer.calls, len(answer.errors)) == (whole[:end], (), 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_a_thought_are_no_calls(name: str) -> None:
    answer = parse(name, f"<think>\nI write {WRITTEN[name]}.\n</think>\n\n{WRITTEN[name]}")
    assert [call.name for call in answer.calls] == ["add"]
    assert answer.content.startswith("<think>\nI write ")
    thought = f"<think>{WRITTEN[name]}</think>no"
    assert (parse(name, thought).content, parse(name, thought).calls) == (thought, ())


@pytest.mark.parametrize(
    ("name", "text", "names", "error"),
    [
        ("hermes", '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": }</tool_call>', ["a"], "Expecting value"),
        ("hermes", '<tool_call>{"name": </tool_call>\n<tool_call>{"name": "b"}</tool_call>', ["b"], "Expecting value"),
        ("hermes", '<tool_call>[1]</tool_call><tool_call>{"name": "b"}</tool_call>', ["b"], "must be an object"),
        ("hermes", '<tool_call>{"name": 1}</tool_call><tool_call>{"name": "b"}</tool_call>', ["b"], "name of a tool"),
        ("hermes", '<tool_call>{"name": "a"}<tool_call>{"name": "b"}</tool_call>', ["b"], "</tool_call> is missing"),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": 3}', ["a"], "must be an object"),
        ("llama3_json", '{"name": "a" "parameters": {}}; {"name": "b", "parameters": {}}', ["b"], "',' delimiter"),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": 1}]', ["a"], "object"),
        ("mistral", '[TOOL_CALLS][{"name": "a" 1}, {"name": "b", "arguments": {}}]', ["b"], "',' delimiter"),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"x": }[TOOL_CALLS]b[ARGS]{"x": 1}', ["b"], "Expecting value"),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}', ["a"], "not closed"),
        (
            "qwen_xml",
            "<tool_call><function=a></tool_call><tool_call><function=b></function></tool_call>",
            ["b"],
            "missing",
        ),
        ("pythonic", "[a(x=1), b(2)]", ["a"], "parameter=value"),
        ("pythonic", "[a(x=open('f')), b(x=2)]", ["b"], "not a literal"),
    ],
)
def test_a_bad_call_beside_a_good_one_is_an_error_and_the_good_one_a_call(
    name: str, text: str, names: list[str], error: str
) -> None:
    answer = parse(name, text)
    assert [call.name for call in answer.calls] == names
    assert len(answer.errors) == 1
    assert error in answer.errors[0]


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_arguments_that_the_model_encoded_as_text_are_decoded_once(name: str) -> None:
    text = WRITTEN[name].replace(json.dumps(GOOD["arguments"]), json.dumps(json.dumps({"a": '{"b": 1}'})))
    assert calls(name, text) == [("add", {"a": '{"b": 1}'})]
    wrong = WRITTEN[name].replace(json.dumps(GOOD["arguments"]), json.dumps("1 2"))
    assert (parse(name, wrong).calls, len(parse(name, wrong).errors)) == ((), 1)


def test_text_around_calls_is_kept() -> None:
    two = 'First\n<tool_call>{"name": "a"}</tool_call> then\n<tool_call>{"name": "b"}</tool_call>\n'
    assert parse("hermes", two).content == "First then"
    assert parse("llama3_json", 'So: <|python_tag|>{"name": "a", "parameters": {}}').content == "So: "
    assert parse("mistral", "So:[TOOL_CALLS]a[CALL_ID]x[ARGS]{}").content == "So:"
    assert parse("pythonic", "So: <|tool_call_start|>[a()]<|tool_call_end|>now").content == "So: now"


def test_a_tag_within_an_argument_ends_nothing() -> None:
    for tag in ("</tool_call>", "<tool_call>", "[TOOL_CALLS]", '{"name": "b"', "</think>"):
        arguments = {"text": f"x{tag}y"}
        body = json.dumps({"name": "a", "arguments": arguments})
        assert calls("hermes", f"<tool_call>\n{body}\n</tool_call>") == [("a", arguments)]
        assert calls("llama3_json", body) == [("a", arguments)]
        assert calls("mistral", f"[TOOL_CALLS][{body}]") == [("a", arguments)]
        assert calls("pythonic", f"[a(text={arguments['text']!r})]") == [("a", arguments)]


def test_mistrals_versions() -> None:
    listed = '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abcdefghi"}]'
    with_id = '[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{"x": 1}'
    without = '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b{"x": 2}'
    assert [
        (call.name, call.arguments, call.id) for text in (listed, with_id) for call in parse("mistral", text).calls
    ] == [("a", {"x": 1}, "abcdefghi")] * 2
    assert calls("mistral", without) == [("a", {"x": 1}), ("b", {"x": 2})]


def test_objects_that_are_no_calls_are_content_in_llamas_format() -> None:
    for text in ('{"name": "Ada"}', '{"answer": 3}', '{"type": "x", "name": "Ada", "age": 36}'):
        assert parse("llama3_json", text) == ParsedAnswer(content=text)
    assert calls("llama3_json", '{"type": "function", "name": "a", "parameters": {}}') == [("a", {})]


def test_pythonic_values() -> None:
    text = (
        r"""[f(a='it\'s', b="x\n\u00e9\q", c='''two"""
        "\n"
        r"""lines''', d=-1.5e3, e=[(1, 2), {}], g=True, h=null, i=.5, j={'k': [None]},), g()]"""
    )
    assert calls("pythonic", text) == [
        (
            "f",
            {
                "a": "it's",
                "b": "x\né\\q",
                "c": "two\nlines",
                "d": -1500.0,
                "e": [[1, 2], {}],
                "g": True,
                "h": None,
                "i": 0.5,
                "j": {"k": [None]},
            },
        ),
        ("g", {}),
    ]


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"qwen_xml"}))
@pytest.mark.parametrize("value", ["9" * 5000, "1e999", '"\\ud800"', "[" * 40 + "]" * 40, "-" * 9])
def test_values_that_cannot_be_rendered_again_are_errors(name: str, value: str) -> None:
    text = WRITTEN[name].replace("1", value, 1)
    answer = parse(name, text)
    assert (answer.calls, len(answer.errors)) == ((), 1)


def test_equal_calls_have_ids_of_their_own_which_depend_on_nothing_but_the_answer_and_its_turn() -> None:
    text = WRITTEN["hermes"] * 2
    first, again = (FORMATS["hermes"].parse(text, turn=2) for _ in range(2))
    assert first == again
    assert first.calls[0].id != first.calls[1].id
    assert first.calls[0].id != FORMATS["hermes"].parse(text, turn=3).calls[0].id
    same_id = '{"name": "a", "arguments": {}, "id": "x"}'
    assert len({call.id for call in parse("mistral", f"[TOOL_CALLS][{same_id}, {same_id}]").calls}) == 2


@pytest.mark.parametrize("marker", ["<|python_start|>", "<|tool_call_start|>"])
def test_a_marker_in_an_argument_of_a_list_without_one_is_text(marker: str) -> None:
    assert calls("pythonic", f"[add(a={marker!r}, b=1)]") == [("add", {"a": marker, "b": 1})]
    assert calls("pythonic", f"[add(a=1) is one way. {marker}[add(a=2)]") == [("add", {"a": 2})]
