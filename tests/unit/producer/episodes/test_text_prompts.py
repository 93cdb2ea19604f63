"""Play environments on prompts of plain text (--input-template), with a tokenizer that has no chat template."""

import copy

import pytest
from tokenizers.processors import TemplateProcessing

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError, RolloutError
from producer.environments.chat import ChatTemplate
from producer.made_environment import check_environment

TEXT = "Q: q\nA:"
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states):
        return {"observation": states["observation"] + START}
    async def step(self, states):
        done = states["observation_text"].endswith("Sure? ")
        reward = float(states["action_text"] == states["label"])
        return {"rewards": reward, "environment_feedback": " Sure? ", "done": done}
"""
EXECUTOR = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        return {"reward": float(output.text == label), "scores": 1}
"""
OWN = """
class Own:
    def reset(self, task):
        assert task.prompt == "Q: q\\nA:"
    def step(self, action):
        return OBSERVATION, 1.0, action.turn == 1, {}
"""


@pytest.fixture(scope="session")
def plain_model(tokenizer, tmp_path_factory):
    """A directory with the tokenizer, which has no chat template."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = None
    directory = tmp_path_factory.mktemp("plain_model")
    own.save_pretrained(directory)
    return directory


@pytest.fixture
def play_text(play_file, plain_model, tmp_path):
    def run(text, answer, name="", *flags):
        path = tmp_path / f"agent_{len(text)}.py"
        path.write_text(text)
        given = ("-m", str(plain_model), "--input-template", "Q: {}\nA:", *flags)
        return play_file(f"{path}{name}", answer, *given, text=TEXT)

    return run


def texts(template, trajectory):
    return template.decode(trajectory.token_ids.tolist())


def test_an_agent_of_openrlhf_plays_on_raw_text(play_text, template):
    done = play_text(AGENT.replace("START", "''"), lambda context: "4")
    assert done.error is None
    assert texts(template, done.trajectories[0]) == f"{TEXT}4<|endoftext|> Sure? 4<|endoftext|>"
    assert done.scores[0].reward == 2.0


def test_an_agent_may_begin_with_text_of_its_own(play_text, template):
    done = play_text(AGENT.replace("START", "' Well,'"), lambda context: "4")
    assert texts(template, done.trajectories[0]).startswith(f"{TEXT} Well,4<|endoftext|>")


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_an_executor_asks_with_the_tokens_of_raw_text(play_text, template, isolation):
    done = play_text(EXECUTOR, lambda context: "4", "", "--env-isolation", isolation)
    assert texts(template, done.trajectories[0]) == f"{TEXT}4<|endoftext|>"
    assert (done.scores[0].reward, done.scores[0].filter_score) == (1.0, 1.0)


def test_an_episode_of_ones_own_returns_text_and_not_messages(play_text, template):
    done = play_text(OWN.replace("OBSERVATION", "' more '"), lambda context: "4", ":Own")
    assert texts(template, done.trajectories[0]) == f"{TEXT}4<|endoftext|> more 4<|endoftext|>"
    messages = OWN.replace("OBSERVATION", "[{'role': 'user', 'content': 'x'}]")
    assert "return text or token ids" in str(play_text(messages, lambda context: "4", ":Own").error)


def test_the_first_text_is_tokenised_as_prompts_are(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": "<s>"})
    bos = own.bos_token_id
    own._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    text = ChatTemplate(own, writes_messages=False)
    assert text.encode_prompt("ab") == (bos, *text.encode("ab"))
    assert text.encode_prompt("<s>ab") == text.encode("<s>ab")
    assert ChatTemplate(own).encode_prompt("ab") == text.encode("ab")  # a chat template has written it, or will not
    with pytest.raises(RolloutError, match="messages cannot be written with --input-template"):
        text.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "text",
    [
        "def interact(messages): return []\ndef reward_fn(messages, answer): return 1",
        "from rl4llm.core.base_env import BaseMDPEnv\nclass Env(BaseMDPEnv):\n  def _run_interaction_loop(self): ...\n"
        "class Reward: name = 'a'\nreward_functions = [Reward()]",
    ],
)
def test_environments_whose_turns_are_messages_are_refused_by_name(tmp_path, text):
    path = tmp_path / "env.py"
    path.write_text(text)
    config, _ = parse(["--env", f"{path}", "--input-template", "Q: {}"])
    check(config)
    with pytest.raises(ConfigError, match="with --input-template: its turns are messages, which a chat template"):
        check_environment(config)
