"""Test how conversations are rendered and bridged, with the templates of the models: what is refused, what follows."""

import json

import pytest

from coati_rl.errors import RolloutError
from producer.environments.chat import ChatTemplate, TemplateError, check_template
from producer.environments.recorder import ConversationTree
from tests.unit.producer.chat_families import FAMILIES, TOOL, completion, family_tokenizer

QUESTION = {"role": "user", "content": "question"}
SENTINEL = "qzqz"
LEAVES_OUT = "leaves out a message of the role 'tool'"
REFUSED = {  # role: family: why
    "user": {},
    "tool": {
        "phi3": LEAVES_OUT,
        "cohere2": LEAVES_OUT,
        "cohere": "must alternate",
        "gemma3": "must alternate",
        "llama3": "leaves out the policy's tool calls",
        "deepseek_r1_distill": "leaves out the policy's tool calls",
    },
    "system": {
        "cohere": "must alternate",
        "cohere2": "must alternate",
        "gemma3": "must alternate",
        "gptoss": "leaves out a message of the role 'system'",
        "mistral_v7": "Unexpected role 'system'",
        "qwen3_5_think": "must be at the beginning",
    },
}
WITHOUT_TOOLS = {"deepseekv3", "deepseek_r1_distill", "llama3", "gemma3", "phi3", "cohere", "cohere2"}
REWRITES = {"deepseekv3", "deepseek_r1_distill", "glm4moe", "gptoss", "nemotron_3_nano", "qwen3_5_think"}  # any answer


def template_of(family, **settings):
    return ChatTemplate(family_tokenizer(family, **settings))


def call(arguments, name="add"):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "call12345", "function": function}]}


def bridge_after(template, prompt, sampled, answer, new):
    """The bridge, as text, after an answer of which `sampled` is recorded; None: a fork."""
    record = template.render([prompt]) + sampled
    then = template.bridge(template.encode(record), record, [prompt, answer], new)
    return None if then.bridge is None else template.decode(then.bridge)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("role", REFUSED)
def test_a_template_that_refuses_an_observation_or_leaves_it_out_is_refused_by_name(role):
    found = {}
    for family in FAMILIES:
        try:
            check_template(template_of(family), roles=[role])
        except TemplateError as error:
            found[family] = str(error)
    assert found.keys() == REFUSED[role].keys()
    for family, reason in REFUSED[role].items():
        assert reason in found[family]


def test_a_template_that_does_not_write_tools_is_refused():
    refused = set()
    for family in FAMILIES:
        try:
            check_template(ChatTemplate(family_tokenizer(family), tools=[TOOL]), roles=["user"])
        except TemplateError as error:
            assert "leaves out the tool 'add'" in str(error)
            refused.add(family)
    assert refused == WITHOUT_TOOLS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bridge_is_what_the_template_writes_after_a_sentinel_in_the_place_of_the_answer(family):
    template, new = template_of(family), [{"role": "user", "content": "next"}]
    tail = template.render([QUESTION, {"role": "assistant", "content": SENTINEL}, *new]).partition(SENTINEL)[2]
    answer = {"role": "assistant", "content": "words"}
    assert bridge_after(template, QUESTION, "words", answer, new) == (None if family in REWRITES else tail)
    ids = template.encode(tail)
    first = family_tokenizer(family).added_tokens_decoder[ids[0]]
    assert first.special and tail.startswith(first.content), "it begins with the token that ends the turn"


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("cohere2", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("mistral_v7", "</s>"),
    ],
)
def test_the_end_of_a_turn_is_inserted_as_far_as_it_was_not_sampled(family, end):
    template, new = template_of(family), [{"role": "user", "content": "next"}]
    answer = {"role": "assistant", "content": "words"}
    bridge = bridge_after(template, QUESTION, "words", answer, new)
    assert bridge.startswith(end)
    ids = template.encode(end)
    for length in range(1, len(ids) + 1):
        sampled = template.decode(ids[:length])
        assert bridge_after(template, QUESTION, f"words{sampled}", answer, new) == bridge.removeprefix(sampled)


def test_white_space_that_a_special_token_takes_along_is_not_a_token_of_the_bridge():
    template, new = template_of("phi3", rstrip=True), [{"role": "user", "content": "next"}]
    answer = {"role": "assistant", "content": "words"}
    prompt = template.prompt([QUESTION])
    for sampled in ("words", "words<|end|>"):
        record = template.render([QUESTION]) + sampled
        ids = prompt + template.encode(sampled)
        then = template.bridge(ids, record, [QUESTION, answer], new)
        assert ids + then.bridge == template.prompt([QUESTION, answer, *new])


def test_there_is_no_bridge_where_a_merge_could_cross_its_beginning():
    tokenizer = family_tokenizer("qwen2_5")
    plain = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    template = ChatTemplate(tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, chat_template=plain))
    answer, new = {"role": "assistant", "content": "words"}, [{"role": "user", "content": "next"}]
    assert bridge_after(template, QUESTION, "words", answer, new) is None
    assert template.render([QUESTION, answer, *new]) == "[question][words][next]["


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a":1}'])
def test_arguments_are_objects_or_text_as_the_template_takes_them(arguments):
    texts = {family: template_of(family).render([QUESTION, call(arguments)]) for family in ("qwen2_5", "deepseekv3")}
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in texts["qwen2_5"]
    assert 'add\n```json\n{"a": 1}\n```' in texts["deepseekv3"]
    assert "<arg_key>a</arg_key>\n<arg_value>1</arg_value>" in template_of("glm4moe").render(
        [QUESTION, call(arguments)]
    )


def test_content_may_be_parts_of_text_and_no_images():
    template = template_of("qwen2_5")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none\ntwo<|im_end|>" in template.render([{"role": "user", "content": parts}])
    with pytest.raises(RolloutError, match="a part of the type 'image_url'; only text is supported"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(RolloutError, match="content of the type int"):
        template.render([{"role": "user", "content": 7}])
    with pytest.raises(RolloutError, match="is not "):
        template.render(["question"])
    with pytest.raises(RolloutError, match="a tool call is not "):
        template.render([QUESTION, {"role": "assistant", "tool_calls": [{"name": "add"}]}])


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi3", "leaves out a message of the role 'tool'"),
        ("cohere", "refuses messages of the roles user, assistant, tool"),
    ],
)
def test_an_observation_that_the_policy_would_not_read_fails_the_episode(family, message):
    template = template_of(family)
    tree = ConversationTree(template, episode=0)
    root = tree.start(template.prompt([QUESTION]), [QUESTION])
    said = {"role": "assistant", "content": "tool"}
    node = tree.add(tree.extend(root), completion(template.encode("tool")), temperature=1.0, message=said)
    with pytest.raises(TemplateError, match=message):
        tree.extend(node, [{"role": "tool", "content": "tool"}])  # its text is in the conversation, but not as this


MISTRAL_CALL = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call12345"}]</s>'
MISTRAL_TOOLS = f"[AVAILABLE_TOOLS][{json.dumps(TOOL)}][/AVAILABLE_TOOLS]"
# What mistral_common 1.13.1 writes for the same conversation, MistralTokenizer.from_file(...).encode_chat_completion(
# ChatCompletionRequest(messages=..., tools=[TOOL])).text: of tekken_240718 (v3), and of v7, whose SentencePiece file
# alone has a space after each special token that is not taken here.
MISTRAL = {
    "mistral_v3": [
        f"<s>{MISTRAL_TOOLS}[INST]be brief\n\nquestion[/INST]",
        f'{MISTRAL_CALL}[TOOL_RESULTS]{{"content": 4, "call_id": "call12345"}}[/TOOL_RESULTS]',
        f"<s>[INST]question[/INST]{MISTRAL_CALL}"
        '[TOOL_RESULTS]{"content": 4, "call_id": "call12345"}[/TOOL_RESULTS]'
        f"four</s>{MISTRAL_TOOLS}[INST]be brief\n\nnext[/INST]",
    ],
    "mistral_v7": [
        f"<s>[SYSTEM_PROMPT]be brief[/SYSTEM_PROMPT]{MISTRAL_TOOLS}[INST]question[/INST]",
        f"{MISTRAL_CALL}[TOOL_RESULTS]call12345[TOOL_CONTENT]4[/TOOL_RESULTS]",
        f"<s>[SYSTEM_PROMPT]be brief[/SYSTEM_PROMPT][INST]question[/INST]{MISTRAL_CALL}"
        "[TOOL_RESULTS]call12345[TOOL_CONTENT]4[/TOOL_RESULTS]"
        f"four</s>{MISTRAL_TOOLS}[INST]next[/INST]",
    ],
}


@pytest.mark.parametrize("family", MISTRAL)
def test_mistrals_tools_move_to_the_last_question_and_so_fork_there_alone(family):
    first, second, third = MISTRAL[family]
    template = ChatTemplate(family_tokenizer(family), tools=[TOOL])
    opening = [{"role": "system", "content": "be brief"}, QUESTION]
    tree = ConversationTree(template, episode=0)
    root = tree.start(template.prompt(opening), opening)
    assert root.text == first
    sampled = template.encode(MISTRAL_CALL)
    node = tree.add(tree.extend(root), completion(sampled), temperature=1.0, message=call({"a": 1}))
    bridged = tree.extend(node, [{"role": "tool", "tool_call_id": "call12345", "content": "4"}])
    assert (bridged.is_fork, bridged.text) == (False, first + second)
    four = {"role": "assistant", "content": "four"}
    node = tree.add(bridged, completion(template.encode("four</s>")), temperature=1.0, message=four)
    forked = tree.extend(node, [{"role": "user", "content": "next"}])
    assert (forked.is_fork, forked.text) == (True, third)
