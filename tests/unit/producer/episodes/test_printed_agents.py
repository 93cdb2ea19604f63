"""Run files in the original interfaces of OpenRLHF, RL4LLM and RL2, unedited, or see the edit that they need.

tests/data/other_systems/ has them: base classes, loggers, annotations, imports within functions, calls of super().
"""

from pathlib import Path

import pytest

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from producer.made_environment import check_environment

FILES = Path(__file__).parents[3] / "data" / "other_systems"
OPENRLHF, RL4LLM, RL2 = (FILES / name for name in ("openrlhf_agents", "rl4llm_files", "rl2_files"))


def metrics_of(done, episode=0):
    return done.records[episode].get("metrics")


def test_scores_and_logs_of_an_agent_are_those_of_its_last_step(play_file):
    """OpenRLHF sums rewards; of scores, which it filters by, and of logs it takes the last."""
    done = play_file(OPENRLHF / "steps.py", lambda context: "hm")
    for episode in range(2):
        score = done.scores[episode]
        assert (score.reward, score.filter_score, score.verdict, score.answer_correct) == (3.0, 0.75, "wrong", False)
        assert metrics_of(done, episode) == {"turn_count": 3.0, "budget": 64.0}
        assert done.records[episode]["filter_score"] == 0.75
    assert [reward.value for reward in done.trajectories[0].rewards] == [0.5, 1.0, 1.5]
    assert done.trajectories[0].temperature.tolist() == pytest.approx([0.7] * 9)  # as the flags say


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_an_executor_may_play_its_steps_by_the_base_class(play_file, isolation):
    done = play_file(OPENRLHF / "steps_with_bonus.py", lambda context: "hm", "--env-isolation", isolation)
    assert done.error is None
    assert (done.scores[0].reward, done.scores[0].filter_score) == (2.25, 0.5)
    assert metrics_of(done) == {"turns": 2.0}
    assert len(done.trajectories[0].turns) == 2


def test_an_executor_reads_the_budget_and_hands_on_images_that_are_not_there(play_file):
    done = play_file(OPENRLHF / "budget.py", lambda context: "hm", temperature=0.5)
    assert (done.scores[0].reward, done.scores[0].filter_score) == (1.0, None)
    assert metrics_of(done) == {"budget": 64.0, "temperature": 0.5}
    assert done.trajectories[0].temperature.tolist() == [0.5] * 3


def test_the_first_turn_is_sampled_as_the_agent_says(play_file):
    done = play_file(OPENRLHF / "own_sampling.py", lambda context: "hmhm")
    (trajectory,) = done.trajectories[:1]
    first, second = trajectory.turns
    assert (first.end - first.start, second.end - second.start) == (3, 5)  # of max_tokens 3, and of -mnt 64
    assert trajectory.temperature.tolist() == pytest.approx([0.25] * 3 + [0.7] * 5)


def test_the_executor_of_one_answer_takes_the_reward_of_its_file(play_file):
    done = play_file(OPENRLHF / "single_turn.py", lambda context: "It is 4")
    assert (done.scores[0].reward, done.scores[0].filter_score) == (2.0, 0.5)
    assert metrics_of(done) == {"custom_metric": 2.0}
    judged = play_file(OPENRLHF / "judged_turn.py", lambda context: "4")
    assert (judged.scores[0].reward, judged.scores[0].verdict) == (1.0, "ok")


def test_images_of_a_step_are_named_and_not_left_out(play_file):
    assert "step returned environment_images; only text" in str(
        play_file(OPENRLHF / "screenshots.py", lambda context: "hm").error
    )


def test_two_rewards_of_rl4llm_are_combined_by_the_function_that_it_prints(play_file):
    done = play_file(RL4LLM / "two_rewards.py", lambda context: "4")
    assert done.scores[0].reward == pytest.approx(0.85)
    assert metrics_of(done) == {"accuracy_reward": 1.0, "length_reward": 0.5}
    wrong = play_file(RL4LLM / "two_rewards.py", lambda context: "5")
    assert wrong.scores[0].reward == pytest.approx(0.15)


@pytest.mark.parametrize("name", ["OneStepEnv", "TheirEnv"])
def test_one_reward_of_rl4llm_is_kept_as_it_is(play_file, name):
    done = play_file(f"{RL4LLM / 'single_step.py'}:{name}", lambda context: "4")
    assert (done.scores[0].reward, done.scores[0].breakdown) == (0.1, {"correct": 0.1})


def test_tools_of_rl4llm_are_parsed_by_the_environment_and_rewarded_by_name(play_file):
    def answer(context):
        return (
            "4" if "tool\n" in context else '<tool_call>{"name": "add", "arguments": {"numbers": [1, 3]}}</tool_call>'
        )

    done = play_file(RL4LLM / "tools.py", answer, "--max-turns", "3", max_new_tokens=100)
    assert done.error is None
    assert done.scores[0].reward == 1.25
    assert metrics_of(done) == {"accuracy_reward": 1.0, "tool_usage_reward": 0.25}


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        (OPENRLHF / "before_0_9.py", "since 0.9; its class of steps can be played: --env {}:AgentInstance"),
        (OPENRLHF / "step_function.py", "write it as RL2's env_step(state, action, answer), which returns"),
        (OPENRLHF / "imports_more.py", "without it a file can import openrlhf.utils.agent (AgentInstanceBase, "),
        (RL4LLM / "training_script.py", "keep the agent and its rewards in a file without other imports of rl4llm"),
        (RL2 / "search.py", "RL2 is not installed: leave this import out, and what needs it, or install it"),
        (RL2 / "deep_research.py", "write it as RL2's env_step(state, action, answer), which returns"),
    ],
)
def test_what_cannot_be_run_says_which_edit_it_needs(path, edit):
    with pytest.raises(ConfigError) as caught:
        check_environment(parse(["--env", f"{path}"])[0])
    assert edit.format(path) in str(caught.value)


def test_the_steps_of_an_old_executor_run_as_its_message_says(play_file):
    done = play_file(f"{OPENRLHF / 'before_0_9.py'}:AgentInstance", lambda context: "hm")
    assert (done.scores[0].reward, done.scores[0].filter_score) == (1.0, None)


REWARD = """
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage

class Reward(BaseRewardFunction):
    def __init__(self, name="one"):
        super().__init__(name)
    def __call__(self, messages, ground_truth, **kwargs):
        return 1.0
class Env(BaseMDPEnv):
    def _run_interaction_loop(self, env_state, llm, sampling_params):
        (output,) = llm.generate(prompts=self._convert_to_batch_prompts(env_state), sampling_params=sampling_params)
        env_state.sample_states[0].messages.append(ChatMessage(role=ROLE, content=output["text"]))
        return env_state
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Other(Reward):\n    def __init__(self):\n        super().__init__('two')",
            "the file has several rewards (one, two) and nothing that makes one of them, which RL4LLM refuses, too",
        ),
        ("class Other(Reward): pass", "two rewards have the name 'one', and one of them would be lost"),
        (
            "class Other(Reward):\n    def __init__(self, cost):\n        super().__init__('two')",
            "the reward Other cannot be made without arguments (TypeError: ",
        ),
        (
            "class Other(Reward):\n    def __init__(self):\n        super().__init__('two')\n"
            "def a(reward_dict): ...\ndef b(reward_dict): ...",
            "a and b both take reward_dict",
        ),
    ],
)
def test_rewards_of_which_nobody_says_what_counts_are_refused(tmp_path, text, message):
    path = tmp_path / "env.py"
    path.write_text(REWARD + text)
    with pytest.raises(ConfigError, match="--env") as caught:
        check_environment(parse(["--env", f"{path}"])[0])
    assert message in str(caught.value)


def test_a_list_of_rewards_says_which_count_and_with_which_arguments(play_file, tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        REWARD.replace("ROLE", "'assistant'")
        + "class Other(Reward):\n    def __init__(self, cost):\n        super().__init__('two')\n"
        + "reward_functions = [Reward('a'), Other(cost=2)]\n"
        + "def reward_transform_fn(reward_dict):\n    return reward_dict['a'] + 2 * reward_dict['two']\n"
    )
    assert play_file(path, lambda context: "hm").scores[0].reward == 3.0


@pytest.mark.parametrize(
    ("body", "reward", "cause"),
    [
        ("reward_dict['one'] += reward_dict['two']\n    return reward_dict['one']", 3.0, None),
        ("return [2.5]", 2.5, None),
        ("return 2.5", None, "reward_transform_fn returned the shape (), (1,) is expected"),
        ("return reward_dict['none']", None, "the agent raised KeyError: 'none'"),
    ],
)
def test_a_transformer_leaves_the_rewards_and_returns_one_number(play_file, tmp_path, body, reward, cause):
    path = tmp_path / "env.py"
    two = "class Two(Reward):\n    def __init__(self):\n        super().__init__('two')\n"
    two += "    def __call__(self, messages, ground_truth):\n        return 2\n"
    text = REWARD.replace("ROLE", "'assistant'") + two + f"def reward_transform_fn(reward_dict):\n    {body}\n"
    path.write_text(text)
    done = play_file(path, lambda context: "hm")
    if cause is not None:
        assert cause in str(done.error)
        return
    assert (done.scores[0].reward, metrics_of(done)) == (reward, {"one": 1.0, "two": 2.0})


def test_one_reward_is_not_changed_by_a_function_that_is_not_called_reward_transform_fn(play_file, tmp_path):
    path = tmp_path / "env.py"
    path.write_text(REWARD.replace("ROLE", "'assistant'") + "def shown(reward_dict): return 5\n")
    assert play_file(path, lambda context: "hm").scores[0].reward == 1.0


def test_a_reward_that_a_function_has_made_has_no_name(play_file, tmp_path):
    """Nor if the function has returned the one that there is: names do not depend on values."""
    path = tmp_path / "env.py"
    made = "def reward_transform_fn(reward_dict): return reward_dict['one']\n"
    path.write_text(REWARD.replace("ROLE", "'assistant'") + made)
    done = play_file(path, lambda context: "hm")
    assert (done.scores[0].reward, done.scores[0].breakdown, metrics_of(done)) == (1.0, {}, {"one": 1.0})


def test_a_log_that_is_no_finite_number_is_no_metric_and_spoils_no_sample(play_file, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("""
from openrlhf.utils.agent import AgentInstanceBase
class AgentInstance(AgentInstanceBase):
    async def step(self, states):
        logs = {"nan": float("nan"), "many": [1, 2], "ns": 10**18, "yes": True, "nothing": None}
        return {"rewards": 1, "scores": None, "environment_feedback": "", "done": True, "extra_logs": logs}
""")
    done = play_file(path, lambda context: "hm")
    assert metrics_of(done) == {"ns": 1e18, "yes": 1.0}
    assert (done.scores[0].reward, done.scores[0].filter_score) == (1.0, None)


def test_a_conversation_that_ends_with_another_role_is_invalid_as_for_rl4llm(play_file, tmp_path):
    path = tmp_path / "env.py"
    path.write_text(REWARD.replace("ROLE", "'user'"))
    assert "ends with a message of the role user" in str(play_file(path, lambda context: "hm").error)


def test_an_environment_that_cannot_be_made_is_refused_before_anything_starts(template, tmp_path):
    path = tmp_path / "env.py"
    path.write_text(REWARD + "    def __init__(self, **kwargs):\n        super().__init__(**kwargs, tools=1)\n")
    facts = check_environment(parse(["--env", f"{path}"])[0])
    with pytest.raises(ConfigError, match=r"env.py: cannot be made: TypeError: .*'tools'"):
        facts.check_tokenizer(template._tokenizer)


@pytest.mark.parametrize(
    ("url", "cause"),
    [("http://rm:5000", "a served reward model is named by -rt, beside --env"), ("no.py", "no.py: there is no such")],
)
def test_a_reward_that_an_executor_cannot_ask_is_refused_before_anything_starts(tmp_path, url, cause):
    path = tmp_path / "agent.py"
    path.write_text((OPENRLHF / "single_turn.py").read_text().replace("reward_func.py", url))
    with pytest.raises(ConfigError, match=cause):
        check_environment(parse(["--env", f"{path}"])[0]).check_tokenizer(None)
