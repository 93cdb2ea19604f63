"""Run the examples of docs/examples, agents in the forms of RL2, RL4LLM and OpenRLHF, as --env does."""

from pathlib import Path

import numpy as np
import pytest

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from producer.made_environment import check_environment

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "agent.py"
        path.write_text(text)
        return path

    return write


def parts(template, trajectory):
    """The texts of a trajectory, in and out of the loss by turns, the prompt first."""
    found, at = [], 0
    for turn in trajectory.turns:
        found += [trajectory.token_ids[at : turn.start], trajectory.token_ids[turn.start : turn.end]]
        at = turn.end
    assert at == len(trajectory.token_ids)
    loss = [index for turn in trajectory.turns for index in range(turn.start, turn.end)]
    assert np.flatnonzero(trajectory.loss_mask).tolist() == loss
    each = [-np.arange(1, turn.end - turn.start + 1, dtype=np.float32) for turn in trajectory.turns]
    assert trajectory.logprobs.tolist() == np.concatenate(each).tolist()
    return [template.decode(ids.tolist()) for ids in found]


PROMPT = "<|im_start|>user\nq<|endoftext|>\n<|im_start|>assistant\n"
BRIDGE = "\n<|im_start|>{}\n{}<|endoftext|>\n<|im_start|>assistant\n"


def test_interact_of_rl2_returns_tools_messages_until_none_is_called(play_file, template):
    def answer(context):
        return "4" if "Lima" in context else "<search>capital of Peru</search>"

    done = play_file(EXAMPLES / "rl2_interact.py", answer)
    assert done.error is None
    for episode, trajectory in enumerate(done.trajectories):
        assert parts(template, trajectory) == [
            PROMPT,
            "<search>capital of Peru</search><|endoftext|>",
            BRIDGE.format("tool", "Lima"),
            "4<|endoftext|>",
        ]
        assert [(r.position, r.value) for r in trajectory.rewards] == [(len(trajectory.token_ids) - 1, 1.0)]
        assert (done.scores[episode].reward, done.scores[episode].verdict) == (1.0, "ok")


def test_a_limit_ends_interact_with_the_reward_of_what_was_said(play_file, file):
    script = file(
        "def interact(messages): return [{'role': 'tool', 'content': 'go on'}]\n"
        "def reward_fn(messages, answer): return len(messages) + 0.5\n"
    )
    for flags in ((), ("--env-isolation", "process")):
        done = play_file(script, lambda context: "x", "--max-turns", "3", *flags)
        assert [done.scores[number].reward for number in range(2)] == [6.5, 6.5]  # q, x, go on, x, go on, x
        assert done.trajectories[0].turns[-1].finish_reason == "length"


def test_the_agent_that_openrlhf_prints_runs_as_it_is_printed(play_file, template):
    done = play_file(EXAMPLES / "openrlhf_agent.py", lambda context: "hm", group_size=8)
    feedback = "\n\nHuman: [INCORRECT]\nPlease analyze the issues and try again.\n</s>\n\nAssistant: "
    for episode, trajectory in enumerate(done.trajectories):
        num_turns = len(trajectory.turns)
        assert 2 <= num_turns <= 4
        assert parts(template, trajectory) == [
            PROMPT,
            "hm<|endoftext|>",
            *[feedback, "hm<|endoftext|>"] * (num_turns - 1),
        ]
        assert done.scores[episode].reward in (0.0, 1.0)
        info = done.records[episode]["turns"][-1]["info"]
        assert info == {"scores": [done.scores[episode].reward], "dummy_scores": [done.scores[episode].reward]}


def test_an_agent_of_openrlhf_says_how_the_next_turn_is_sampled_and_gives_rewards_by_turn(play_file, file):
    script = file("""
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    def __init__(self, most=2):
        self.most = most
    async def reset(self, states):
        self.turn = 0
        return {"observation": "Q: " + states["label"] + " A:"}
    async def step(self, states):
        self.turn += 1
        params = states["sampling_params"]
        params.temperature = 0.25
        assert states["observation_text"].startswith("Q: 4 A:")
        return {"rewards": self.turn, "environment_feedback": "+", "done": self.turn == self.most,
                "sampling_params": params}
""")
    done = play_file(f"{script}:AgentInstance", lambda context: "hm", "--env-arg", "most=3", group_size=1)
    (trajectory,) = done.trajectories
    assert trajectory.temperature.tolist() == pytest.approx([0.7] * 3 + [0.25] * 6)
    assert [reward.value for reward in trajectory.rewards] == [1.0, 2.0, 3.0]
    assert done.scores[0].reward == 6.0


def test_a_change_of_the_sampling_holds_for_later_turns_and_one_of_max_tokens_for_one(play_file, file):
    """OpenRLHF gives the same object to each step, and sets its max_tokens anew."""
    script = file("""
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0
    async def step(self, states):
        self.turn += 1
        params = states["sampling_params"]
        assert params.max_tokens == 64
        if self.turn == 1:
            params.temperature, params.max_tokens = 0.25, 1
        return {"rewards": 1, "environment_feedback": "+", "done": self.turn == 3}
""")
    (trajectory,) = play_file(script, lambda context: "hm", group_size=1).trajectories
    assert trajectory.temperature.tolist() == pytest.approx([0.7] * 3 + [0.25] * 4)
    assert [turn.end - turn.start for turn in trajectory.turns] == [3, 1, 3]


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_execute_of_openrlhf_asks_the_engine_and_is_recorded_as_it_was_sampled(play_file, template, isolation):
    done = play_file(EXAMPLES / "openrlhf_executor.py", lambda context: "hm", "--env-isolation", isolation)
    for episode, trajectory in enumerate(done.trajectories):
        assert parts(template, trajectory) == [PROMPT, "hm<|endoftext|>", "\nAgain: ", "hm<|endoftext|>"]
        assert done.scores[episode].reward == 1.0
        assert done.records[episode]["turns"][-1]["info"] == {"scores": 1.0, "turns": 2}


EXECUTE = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt)["input_ids"]
        sampling_params.max_tokens = max_length - len(tokens)
        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        {}
"""


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (
            'await llm_engine.generate(hf_tokenizer(prompt + output.text + "!")["input_ids"], sampling_params)',
            "the agent asks with other tokens than were sampled",
        ),
        ("return {'reward': None}", "execute has to return a dictionary with a reward"),
        ("return {'reward': 1, 'observation_tokens': tokens}", "observation_tokens that execute returned are not"),
        ("return {'reward': 1, 'action_ranges': [(0, 1)]}", "execute returned action_ranges [(0, 1)]"),
        ("return {'reward': 1, 'action_loss_mask': [1, 0]}", "execute returned an action_loss_mask with zeros"),
        (
            "await llm_engine.generate(tokens, sampling_params, multi_modal_data={'image': 1})",
            "takes token ids and sampling_params, and not multi_modal_data; only text is supported",
        ),
        ("raise OSError('no search')", "the agent raised OSError: no search"),
        ("sampling_params.n = 4; await llm_engine.generate(tokens, sampling_params)", "n=4 answers to a turn"),
        (
            "\n        while True:\n            tokens = tokens + output.token_ids"
            "\n            output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]",
            "execute still asked when the limit was reached",
        ),
    ],
)
def test_what_an_executor_does_to_tokens_that_are_not_recorded_is_an_invalid_sample(play_file, file, body, cause):
    done = play_file(file(EXECUTE.replace("{}", body)), lambda context: "hm", "--max-turns", "2")
    assert done.error is not None
    assert cause in str(done.error)


def test_the_environment_of_rl4llm_asks_again_until_the_answer_is_right(play_file, template):
    def answer(context):
        return "4" if "No." in context else " 5 "

    done = play_file(EXAMPLES / "rl4llm_env.py", answer, "--max-turns", "4")
    for episode, trajectory in enumerate(done.trajectories):
        assert parts(template, trajectory) == [
            PROMPT,
            " 5 <|endoftext|>",
            BRIDGE.format("user", "No. Try again."),
            "4<|endoftext|>",
        ]
        assert (done.scores[episode].reward, done.scores[episode].breakdown) == (1.0, {"correct": 1.0})


def test_env_step_of_rl2_appends_text_and_may_not_rewrite_it(play_file, file, template):
    script = file("""
async def env_step(state, action, answer):
    if action == "end":
        return {"next_state": None, "done": True, "reward": float(answer)}
    return {"next_state": state + action + " more " if action == "hm" else "new", "done": False, "reward": 0.5}
""")
    done = play_file(script, lambda context: "end" if "more" in context else "hm")
    assert parts(template, done.trajectories[0]) == [PROMPT, "hm<|endoftext|>", " more ", "end<|endoftext|>"]
    assert done.scores[0].reward == 4.5
    assert "env_step rewrites the context" in str(play_file(script, lambda context: "?").error)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1", "", "names no class, and the file has none of these: interact, env_step, AgentExecutor"),
        ("def interact(messages): return []", "", "gives no rewards; define reward_fn(messages, answer)"),
        ("def env_step(sample): ...", "", "env_step takes (sample); of RL2's forms (state, action, answer) can be run"),
        ("class AgentExecutor:\n  async def execute(self, prompt, label): ...", "", "execute takes (self, prompt, "),
        ("from openrlhf.utils.agent import Nothing", "", "fails on import: ImportError"),
        ("from rl4llm.core.base_env import BaseMDPEnv\nclass A(BaseMDPEnv): pass\nclass B(BaseMDPEnv): pass", "",
         "the file has several classes of BaseMDPEnv"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(file, text, name, message):
    with pytest.raises(ConfigError) as caught:
        check_environment(parse(["--env", f"{file(text)}{name}"])[0])
    assert message in str(caught.value)


def test_a_reward_that_the_file_gives_already_is_not_counted_again(file):
    """Named in -rt it would be called a second time, alone or in a sum."""
    script = file(
        "def interact(messages): return []\ndef reward_fn(messages, answer): return 1\ndef brief(text): return 1"
    )
    for env in (script, f"{script}:interact"):
        for reward_type in (f"{script}:reward_fn", f"boxed,{script}:brief,{script}:reward_fn=0.5"):
            with pytest.raises(ConfigError) as caught:
                check_environment(parse(["--env", f"{env}", "-rt", reward_type])[0])
            assert f"--reward-type {script}:reward_fn with --env {env}: " in str(caught.value)
            assert "would count twice; leave it out of --reward-type" in str(caught.value)
        assert check_environment(parse(["--env", f"{env}", "-rt", f"{script}:brief"])[0]).tools == ()
    loop = EXAMPLES / "rl4llm_env.py"
    with pytest.raises(ConfigError, match=r"rl4llm_env.py:CustomReward with --env .*rl4llm_env.py: "):
        check_environment(parse(["--env", f"{loop}", "-rt", f"{loop}:CustomReward"])[0])
