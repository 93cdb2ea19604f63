"""Test that later turns of an episode are rendered with --chat-template-kwargs, as its prompt is."""

import json

import pytest

from coati_rl.reading.chat_template import set_chat_template, set_variables
from producer.environments.chat import ChatTemplate
from tests.unit.producer.chat_families import template_text
from tests.unit.producer.episodes.conftest import QUESTION

NO_THOUGHT = "<think>\n\n</think>\n\n"  # with enable_thinking false, in place of the policy's own
GAME = """
class Game:
    def reset(self, task):
        pass

    def step(self, action):
        return [{"role": "user", "content": f"again {action.turn}"}], 1.0, action.turn == 2, {}
"""


@pytest.fixture
def played(play_file, template, tmp_path):
    """played(template of Qwen3, variables) -> what the policy read in each turn, and the finished group."""
    (tmp_path / "game.py").write_text(GAME)

    def run(family, variables):
        # The test's tokenizer has one token that ends a turn.
        text = template_text(family).replace("<|im_end|>", template._tokenizer.eos_token)
        (tmp_path / "own.jinja").write_text(text)
        own = type(template._tokenizer)(tokenizer_object=template._tokenizer._tokenizer)
        set_chat_template(own, text)
        set_variables(own, date=None, variables=variables)
        contexts = []

        def answer(context):
            contexts.append(context)
            return "said"

        flags = ["--chat-template", str(tmp_path / "own.jinja"), "--chat-template-kwargs", json.dumps(variables)]
        done = play_file(
            f"{tmp_path}/game.py:Game", answer, *flags, group_size=1, text=ChatTemplate(own).render(QUESTION)
        )
        assert done.error is None
        return contexts, done

    return run


def test_every_turn_of_a_template_that_keeps_them_goes_on_in_one_trajectory(played, template):
    contexts, done = played("qwen3_training", {"enable_thinking": False})
    assert [context.count(NO_THOUGHT) for context in contexts] == [1, 2, 3]
    assert all(context.endswith(f"assistant\n{NO_THOUGHT}") for context in contexts)
    (trajectory,) = done.trajectories
    assert len(trajectory.turns) == 3
    sampled = [template.decode(trajectory.token_ids[turn.start : turn.end].tolist()) for turn in trajectory.turns]
    assert {text.removesuffix(template._tokenizer.eos_token) for text in sampled} == {"said"}


def test_every_turn_of_a_template_that_takes_them_out_of_earlier_turns_is_asked_for_with_them(played):
    contexts, done = played("qwen3", {"enable_thinking": False})
    assert [context.count(NO_THOUGHT) for context in contexts] == [1, 1, 1]
    assert all(context.endswith(f"assistant\n{NO_THOUGHT}") for context in contexts)
    assert len(done.trajectories) == 3, "forks, since the template writes earlier turns in another way"


def test_without_them_no_turn_has_them(played):
    contexts, _ = played("qwen3", {})
    assert len(contexts) == 3 and not any("<think>" in context for context in contexts)
