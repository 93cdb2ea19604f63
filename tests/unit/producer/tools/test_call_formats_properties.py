"""Test the parsers against what real templates render, and against hostile text."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.errors import ConfigError
from producer.tools.call_formats import FORMATS, answer_text, tool_format_for
from tests.unit.producer.chat_families import family_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = {  # of templates: the format of their calls
    "qwen2_5": "hermes",
    "qwen2_5_training": "hermes",
    "qwen3": "hermes",
    "qwen3_training": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "qwen3_5_think": "qwen_xml",
    "qwen3_5_nothink": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
}
MISTRAL = (  # of Mistral-7B-Instruct-v0.3, the part that renders conversations with one call
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% set out = call.function|tojson %}{{ out[:-1] }}"
    "{% if call.id|length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}"
    "{% endfor %}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}{% endif %}"
    "{% endfor %}"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "]", '"', "\\", '{"name": "', "\n", "'", "</think>"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4)
TEXTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), TEXT, max_size=4)  # values without types
FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "[TOOL_CALLS]"]
    )
    | st.sampled_from(["[ARGS]", "[CALL_ID]", "f(", "x=", ".5", "e9", "true", "None", "<|python_tag|>", "\\u", "'''"])
    | st.sampled_from(
        [
            "<|tool_call_start|>",
            "</think>",
            "<function=f>",
            "</function>",
            "<parameter=x>",
            "</parameter>",
            *"{}[](),:;\"'\\\n 1-",
        ]
    ),
    max_size=40,
).map("".join)


@pytest.fixture
def render(tokenizer):
    """Render with a template: (template, messages) -> the text of the last message, which is the assistant's."""

    def rendered(template: str, calls: list[dict[str, Any]], content: str = "") -> str:
        tokenizer.chat_template = template
        question = {"role": "user", "content": "coati asks"}
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        text = tokenizer.apply_chat_template([question, answer], tools=[], tokenize=False, add_generation_prompt=False)
        return text[text.rfind("coati asks") + len("coati asks") :]

    kept = tokenizer.chat_template
    yield rendered
    tokenizer.chat_template = kept


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", [*NAMES, "mistral"])
def test_what_a_template_renders_for_a_call_is_read_back(template: str, render, tokenizer) -> None:
    source = MISTRAL if template == "mistral" else (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    expected = NAMES.get(template, "mistral")

    @settings(max_examples=25, deadline=None)
    @given(TEXTS if expected == "qwen_xml" else ARGUMENTS)
    def holds(arguments: dict[str, Any]) -> None:
        answer = FORMATS[expected].parse(render(source, [call("f.g-h", arguments)]))
        assert [(one.name, one.arguments) for one in answer.calls] == [("f.g-h", arguments)]
        assert answer.errors == ()
        if template == "mistral":
            assert answer.calls[0].id == "call00000"

    holds()
    assert tool_format_for(tokenizer).name == expected


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "mistral"])
def test_several_calls_and_text_are_read_back_and_rendered_to_the_same_text(template: str, render) -> None:
    source = MISTRAL if template == "mistral" else (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    content = "" if template == "mistral" else "I look:"
    wanted = [call("f", {"x": "é</tool_call>"}, 1), call("g", {}, 2)]
    rendered = render(source, wanted, content)
    answer = FORMATS[NAMES.get(template, "mistral")].parse(rendered)
    assert [(one.name, one.arguments) for one in answer.calls] == [("f", {"x": "é</tool_call>"}), ("g", {})]
    written = answer.message()["tool_calls"]
    assert render(source, written, content) == rendered if template == "mistral" else content in answer.content


def test_pythonic_calls_are_read_back() -> None:
    @settings(max_examples=50, deadline=None)
    @given(ARGUMENTS)
    def holds(arguments: dict[str, Any]) -> None:
        text = f"[f({', '.join(f'{name}={value!r}' for name, value in arguments.items())})]"
        assert [one.arguments for one in FORMATS["pythonic"].parse(text).calls] == [arguments]

    holds()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
def test_no_text_raises_and_what_is_no_call_is_in_the_content(name: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(FRAGMENTS)
    def holds(text: str) -> None:
        answer = FORMATS[name].parse(text)
        assert answer.calls or answer.content == text
        json.dumps(answer.message()).encode()

    holds()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 200_000,
        '{"name": [1, 1, 1, 1, 1, 1, 1, ' * 20_000,
        "<tool_call>" * 90_000,
        "<tool_call><function=f>" + "<parameter=x>" * 50_000,
        "<tool_call><function=f>" + "<parameter=x></parameter>" * 40_000,
        ("<tool_call><function=f><parameter=x>" + " " * 99) * 7_000,
        '[TOOL_CALLS][{"name": ' * 40_000,
        "[TOOL_CALLS]" + "a" * 500_000,
        "[f(x=" + "(" * 400_000,
        "[f(x=" + "{" * 400_000,
        "[f(x=" + "-" * 400_000,
        "[f(x='" + "\\" * 500_000,
        "[f(x='''" * 60_000,
        "[" + "f(x=1), " * 60_000,
        "<|python_tag|>" + '{"name":"' * 60_000,
        " " * 900_000 + '{"name":',
        "\n" * 500_000 + "<tool_call>",
        "9" * 900_000,
    ],
    ids=lambda text: text[:24],
)
def test_no_text_keeps_a_parser_busy(name: str, text: str) -> None:
    started = time.process_time()
    answer = FORMATS[name].parse(text)
    assert time.process_time() - started < 2.0  # 0.2 s at most on an idle core
    assert len(answer.calls) + len(answer.errors) <= 64 + 1


def test_an_answer_of_megabytes_is_not_searched() -> None:
    answer = FORMATS["hermes"].parse('<tool_call>{"name": "a"}</tool_call>' + " " * (1 << 20))
    assert (answer.calls, len(answer.errors)) == ((), 1)


@pytest.mark.parametrize("template", ["glm4moe", "gptoss", "gemma"])
def test_a_template_that_writes_calls_otherwise_is_refused_with_the_choices(template: str, render, tokenizer) -> None:
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--tool-format auto: .*: hermes, qwen_xml, mistral, pythonic, llama3_json"):
        tool_format_for(tokenizer)
    assert tool_format_for(tokenizer, "hermes").name == "hermes"
    with pytest.raises(ConfigError, match="--tool-format 'xml': use one of auto, hermes"):
        tool_format_for(tokenizer, "xml")


def test_a_template_without_calls_leaves_it_to_the_vocabulary() -> None:
    class Tokenizer:
        def apply_chat_template(self, messages, **_) -> str:
            return "".join(message["content"] for message in messages)

        def get_vocab(self) -> dict[str, int]:
            return {"[TOOL_CALLS]": 9}

    assert tool_format_for(Tokenizer()).name == "mistral"


def test_an_answer_is_decoded_with_special_tokens_but_for_those_at_its_end(tokenizer) -> None:
    end = tokenizer.eos_token_id
    inner = tokenizer.encode("ab", add_special_tokens=False)
    assert answer_text(tokenizer, [*inner, end, *inner, end, end]) == f"ab{tokenizer.eos_token}ab"
    gemma = family_tokenizer("gemma3")  # in which this one is special and has no name
    unnamed = gemma.convert_tokens_to_ids("<start_of_turn>")
    assert unnamed not in gemma.all_special_ids
    assert answer_text(gemma, [*gemma.encode("ab", add_special_tokens=False), unnamed]) == "ab"
