"""Test the reward model's numbers: those of transformers for a single conversation, whatever is scored beside it."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rewards.model.reward_model as module
from rewards.__main__ import main
from rewards.model.judgement import JudgedConversation
from rewards.model.reward_model import RewardModel
from tests.unit.rewards.tiny_reward_model import MAX_TOKENS, write_reward_model

QUESTION = ({"role": "user", "content": "1+1?"},)
RESPONSES = ["2", "It is two.", "", "three, or four?"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def model(directory):
    return RewardModel(directory, device="cpu", dtype=torch.float32)


def asked(response, messages=QUESTION):
    return JudgedConversation(messages=messages, response=response)


def expected_of(directory, response):
    """The score of one conversation, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reference = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    text = f"<user>1+1?</s><assistant>{response}</s>"
    with torch.no_grad():
        return reference(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()


def test_the_reward_is_transformers_whatever_it_is_batched_with(directory, model):
    judged = model.score([asked(response) for response in RESPONSES])
    expected = [expected_of(directory, response) for response in RESPONSES]
    assert [judgement.reward for judgement in judged] == pytest.approx(expected, abs=1e-5)
    assert len({round(reward, 3) for reward in expected}) == len(RESPONSES)


def test_without_a_padding_token_the_last_token_is_read(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}))
    judged = RewardModel(tmp_path, device="cpu", dtype=torch.float32).score([asked(each) for each in RESPONSES])
    expected = [expected_of(tmp_path, response) for response in RESPONSES]
    assert [judgement.reward for judgement in judged] == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected_of(directory, RESPONSES[0])) > 1e-3, "which is </s>, and the token before it"


def test_batches_are_bounded_by_their_tokens_with_padding(model, monkeypatch):
    sizes = []
    forward = model._forward
    monkeypatch.setattr(model, "_forward", lambda sequences: sizes.append(len(sequences)) or forward(sequences))
    together = model.score([asked(response) for response in RESPONSES])
    monkeypatch.setattr(module, "MAX_BATCH_TOKENS", 40)
    apart = model.score([asked(response) for response in RESPONSES])
    assert sizes == [4, 2, 1, 1], "of 8, 9, 18 and 23 tokens: three of 18 are more than 40 tokens, and so are two of 23"
    assert [each.reward for each in together] == pytest.approx([each.reward for each in apart], abs=1e-5)


def test_without_messages_the_texts_are_scored(model):
    (plain,) = model.score([JudgedConversation(messages=(), prompt="<user>1+1?</s><assistant>", response="2</s>")])
    (rendered,) = model.score([asked("2")])
    assert plain.reward == pytest.approx(rendered.reward, abs=1e-5)


def test_what_cannot_be_scored_has_a_problem_and_leaves_the_others_alone(model):
    too_long, refused, good = model.score(
        [asked("x" * MAX_TOKENS), asked("2", ({"role": "tool", "content": "2"},)), asked("2")]
    )
    assert too_long.problem == f"{MAX_TOKENS + 8} tokens, more than the model's {MAX_TOKENS} positions"
    assert good.problem == ""
    assert good.reward == pytest.approx(model.score([asked("2")])[0].reward, abs=1e-5)
    assert refused.problem == "the chat template refuses it: TemplateError: unknown role"


@pytest.mark.full
def test_the_score_command_scores_with_it_alone_and_in_a_sum(directory, monkeypatch, capsys):
    line = {"response": r"\boxed{2}", "messages": [{"role": "user", "content": "1+1?"}]}
    expected = expected_of(directory, line["response"])
    for reward_type, truth in ((f"model:{directory}", {}), (f"boxed=1,model:{directory}=0.5", {"gt_answer": "2"})):
        stdin = SimpleNamespace(buffer=io.BytesIO(json.dumps({**line, **truth}).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["score", "--type", reward_type]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["reward"] == pytest.approx(1 + 0.5 * expected if truth else expected, abs=1e-5)
        assert found["detail"] == ("2 equals 2" if truth else f"the reward model: {found['reward']:g}")
    assert found["breakdown"] == {"boxed": 1.0, directory.name: pytest.approx(expected, abs=1e-5)}
