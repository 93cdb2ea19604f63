"""Test that calls are read back as Mistral's own tokenizers write them."""

import json
from pathlib import Path
from typing import Any

import mistral_common
import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from producer.tools.call_formats import FORMATS

DATA = Path(mistral_common.__file__).parent / "data"
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("look_up", {"text": 'é] "[TOOL', "numbers": [1, {"none": None}]}, "abcdefghi"),
    ("stop", {}, "abcdefghj"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "file",
    ["mistral_instruct_tokenizer_240323.model.v3", "mistral_instruct_tokenizer_241114.model.v7", "tekken_240911.json"],
)
def test_calls_are_read_back_as_mistrals_tokenizers_write_them(file: str) -> None:
    written = [
        ToolCall(id=call_id, function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for name, arguments, call_id in CALLS
    ]
    request = ChatCompletionRequest(
        messages=[
            UserMessage(content="question"),
            AssistantMessage(content=None, tool_calls=written),
            *(ToolMessage(tool_call_id=call_id, name=name, content="result") for name, _, call_id in CALLS),
        ],
        tools=[Tool(function=Function(name=name, parameters={})) for name, _, _ in CALLS],
    )
    rendered = MistralTokenizer.from_file(str(DATA / file)).encode_chat_completion(request).text
    assert rendered is not None
    answer = rendered[rendered.index("[TOOL_CALLS]") :].split("</s>")[0].replace("\u2581", " ")
    parsed = FORMATS["mistral"].parse(answer)
    assert [(call.name, call.arguments, call.id) for call in parsed.calls] == CALLS
    assert (parsed.content, parsed.errors) == ("", ())
