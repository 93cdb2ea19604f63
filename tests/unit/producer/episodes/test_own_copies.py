"""Test that what an episode changes is its own: the others of its group, and the conversation, stay as they were."""

import threading

import pytest

from producer.environments.episode import EpisodeFailure
from producer.environments.own_copies import own_arguments
from producer.environments.own_episode import episode_factory
from tests.unit.producer.episodes.talk import Talk

OPENRLHF = """
class Agent(AgentInstanceBase):
    def __init__(self, cards):
        self.given = len(cards)
        cards.pop()
    async def reset(self, states):
        return {"observation": states["observation"]}
    async def step(self, states):
        return {"rewards": float(self.given), "environment_feedback": "", "done": True}
"""
OWN = """
class Cards:
    def __init__(self, cards):
        self.given = len(cards)
        cards.pop()
    def reset(self, task): return None
    def step(self, action): return None, float(self.given), True
"""
EXECUTOR = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, cards):
        self.given = len(cards)
        cards.pop()
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        await llm_engine.generate(hf_tokenizer.encode(prompt, add_special_tokens=False), sampling_params)
        return {"reward": float(self.given)}
"""
BASES = "from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor\n"
EXECUTOR_OF_STEPS = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self, cards):
        given = len(cards)
        cards.pop()
        class Counted(Agent):
            def __init__(self): self.given = given
        super().__init__(Counted)
"""
RL4LLM = """
class Given(BaseRewardFunction):
    def __init__(self): super().__init__("given")
    def __call__(self, messages, ground_truth): return 0.0
class Env(BaseMDPEnv):
    def __init__(self, tokenizer, reward_functions, cards):
        super().__init__(tokenizer=tokenizer, reward_functions=reward_functions)
        self.given = len(cards)
        cards.pop()
    def _run_interaction_loop(self, states, llm, sampling_params):
        for state in states.sample_states:
            state.messages.append(ChatMessage(role="assistant", content=llm.generate("q", sampling_params)["text"]))
        return states
    def _calculate_rewards(self, states):
        return [float(self.given)], {}
"""
RL4LLM_BASES = "from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage\n"


def test_episodes_that_change_their_tasks_begin_with_what_the_dataset_holds(play):
    class Takes(Talk):
        def reset(self, task):
            self.cards = task.columns["cards"]
            self.given = (list(self.cards), task.messages[0]["content"])
            self.cards.pop()
            task.messages[0]["content"] += ", changed"

        def step(self, action):
            return None, float(self.given == (["ace", "king"], "q")), True

    columns = {"cards": ["ace", "king"]}
    (done,) = play(Takes, columns=columns, group_size=4)
    assert [done.scores[episode].reward for episode in range(4)] == [1.0] * 4
    assert columns == {"cards": ["ace", "king"]}


@pytest.mark.parametrize("is_async", [False, True])
def test_an_episode_that_changes_its_conversation_leaves_the_next_ones_as_they_were(play, is_async):
    seen = []

    def step(action):
        seen.append([message["content"] for message in action.messages])
        for message in action.messages:
            message["content"] = "changed"
        return Talk.observation, 0.0, action.turn == 1

    async def step_async(action):
        return step(action)

    (done,) = play(lambda: Talk(step=step_async if is_async else step), group_size=1)
    assert done.error is None
    first, second = seen
    assert second[:3] == [*first, "more"]


def test_a_column_that_cannot_be_copied_is_named(play):
    (done,) = play(Talk, columns={"lock": threading.Lock()})
    assert "the column 'lock' cannot be copied for an episode" in done.error


def test_an_argument_that_cannot_be_copied_is_named():
    with pytest.raises(EpisodeFailure, match="the argument 'lock' \\(--env-arg\\) cannot be copied"):
        own_arguments({"lock": threading.Lock()})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (OWN, "Cards"),
        (BASES + OPENRLHF, "Agent"),
        (BASES + EXECUTOR, "AgentExecutor"),
        (BASES + OPENRLHF + EXECUTOR_OF_STEPS, "AgentExecutor"),
        (RL4LLM_BASES + RL4LLM, "Env"),
    ],
)
def test_objects_that_change_their_arguments_are_given_what_the_command_says(play_file, tmp_path, text, name):
    (tmp_path / "cards.py").write_text(text, encoding="utf-8")
    flags = ["--env-arg", "cards=[1, 2, 3]"]
    done = play_file(f"{tmp_path / 'cards.py'}:{name}", lambda context: "4", *flags, group_size=3)
    assert done.error is None
    assert [done.scores[episode].reward for episode in range(3)] == [3.0] * 3


def test_the_arguments_of_a_form_are_not_changed(tmp_path):
    (tmp_path / "cards.py").write_text(OWN, encoding="utf-8")
    arguments = {"cards": [1, 2, 3]}
    form = episode_factory(f"{tmp_path / 'cards.py'}:Cards", arguments)
    assert [form.make().given for _ in range(2)] == [3, 3]
    assert arguments == {"cards": [1, 2, 3]}
