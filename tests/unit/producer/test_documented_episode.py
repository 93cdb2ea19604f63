"""Test that the episode of docs/agents.md, token by token, is what is recorded."""

import re
from pathlib import Path

from tests.unit.producer.talk import Talk, said

PAGE = Path(__file__).resolve().parents[3] / "docs/agents.md"


def test_the_worked_example_of_the_documentation_is_what_is_recorded():
    question = {"role": "user", "content": "What is 17 * 25?"}
    talk = Talk(opening=(question,))
    function = {"name": "multiply", "arguments": '{"a": 17, "b": 25}'}
    thought = "<think>\nI multiply.\n</think>\n\n"
    call = said(thought) | {"tool_calls": [{"id": "call00001", "function": function}]}
    called = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>'
    talk.answer(thought + called, message=call)
    result = {"role": "tool", "tool_call_id": "call00001", "content": "425"}
    talk.answer("It is 425.", context=talk.tree.extend(talk.node, [result]), finish_reason="length")
    sure = {"role": "user", "content": "Sure?"}
    talk.answer("Yes.<|im_end|>", context=talk.tree.extend(talk.node, [sure]))
    rows = re.findall(r"^\| `(.+)` \| (.+) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = ""
    for text, origin, in_loss in rows:
        plain = text.replace("\\|", "|").replace("\\n", "\n")
        documented += (f"[{plain}]" if in_loss == "yes" else plain) + (
            "|" if origin in ("prompt", "shared prefix") else ""
        )
    assert documented == "".join(talk.pieces())
    lengths = [(len(each.token_ids), each.num_loss_tokens) for each in talk.tree.trajectories()]
    assert lengths == [(85, 55), (88, 5)]
