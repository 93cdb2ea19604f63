"""Calls of unchanged clients are found again; changed histories are branches; sessions do not disturb each other."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.unit.gateway.served_episodes import OpenEpisode, Served, served
from tests.unit.gateway.speaking_engine import logprob

CLIENT = Path(__file__).parent / "openai_client.py"
TOOL_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    ' <tool_call>{"name":"add","arguments":{"b":2,  "a":1}}</tool_call>',
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
)
TEXTS = (" It is three.", "Ja, genau: 3 \n", "\n\nthree 日本語 🙂", "  3  ", "{}")


def speech(prompt: str, seed: int) -> str:
    """Calls of tools in changing layouts where there are some, up to three answers of them; else texts."""
    if "<tools>" in prompt and prompt.count("<tool_response>") < 3:
        return TOOL_CALLS[seed % len(TOOL_CALLS)]
    return TEXTS[seed % len(TEXTS)]


def check_record(episode: OpenEpisode, gateway: Served) -> tuple[int, int]:
    """Each sampled token is in one loss, as it was sampled. Returns: the answers, and the forks among them."""
    turns = episode.conversation.turns
    num_sampled = sum(turn["tokens"] for turn in turns)
    assert sum(each.num_loss_tokens for each in episode.trajectories) == num_sampled
    for trajectory in episode.trajectories:
        ids = trajectory.token_ids[trajectory.loss_mask].tolist()
        np.testing.assert_allclose(trajectory.logprobs, [logprob(each) for each in ids], rtol=1e-6)
    return len(turns), sum("is_fork" in turn for turn in turns)


def talk(modes: list[str], *, at_a_time: int) -> tuple[Counter[str], int]:
    """Play an episode of three turns in each mode. Returns: forks by mode, the most requests at a time."""
    with served(speech) as gateway:
        episodes = [gateway.open() for _ in modes]
        told = [
            {"url": episode.url, "key": episode.registered.token, "mode": mode}
            for episode, mode in zip(episodes, modes, strict=True)
        ]
        done = subprocess.run(
            [sys.executable, str(CLIENT), str(at_a_time)],
            input=json.dumps(told),
            text=True,
            capture_output=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        forks: Counter[str] = Counter()
        for episode, mode in zip(episodes, modes, strict=True):
            turns, num_forks = check_record(episode, gateway)
            forks[mode] += num_forks
            assert turns == 3
        follows = [[turn.get("follows") for turn in episode.conversation.turns] for episode in episodes]
        assert follows == [[None, 0, 1]] * len(modes), "each later call is found by its messages"
        return forks, gateway.core.max_running


@pytest.mark.full
def test_the_openai_client_is_stitched() -> None:
    """In tools two of three layouts of a call are not the template's, after which the context is a fork."""
    forks, _ = talk(["chat", "tools", "stream"] * 4, at_a_time=8)
    assert forks["chat"] == forks["stream"] == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", ["chat", "tools"])
def test_200_episodes_of_the_openai_client_are_stitched_64_at_a_time(mode) -> None:
    forks, max_running = talk([mode] * 200, at_a_time=64)
    assert max_running > 8
    assert mode == "tools" or not forks[mode]


@pytest.mark.parametrize("num_alone", [4, pytest.param(64, marks=pytest.mark.full)])
def test_64_sessions_at_a_time_are_each_recorded_as_one_alone(num_alone) -> None:
    question = {"role": "user", "content": "What is 1 and 2?"}

    def play(episode: OpenEpisode, number: int) -> None:
        messages = [question]
        for turn in range(2):
            messages.append(episode.chat(*messages, seed=100 * number + turn)["choices"][0]["message"])
            messages.append({"role": "user", "content": "And again?"})

    with served(speech) as gateway:
        together = [gateway.open() for _ in range(64)]
        threads = [threading.Thread(target=play, args=pair) for pair in zip(together, range(64), strict=True)]
        gateway.core.gate.clear()
        gateway.core.hold_after = 1  # until all of them are there
        for thread in threads:
            thread.start()
        for _ in range(2000):
            if gateway.core.max_running == 64:
                break
            threading.Event().wait(0.005)
        gateway.core.gate.set()
        for thread in threads:
            thread.join(60)
        assert gateway.core.max_running == 64
        for number in range(0, 64, 64 // num_alone):
            alone = gateway.open()
            play(alone, number)
            (first,), (second,) = together[number].trajectories, alone.trajectories
            assert len(first.turns) == 2
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_array_equal(first.loss_mask, second.loss_mask)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_history_that_the_client_has_changed_is_a_branch_whose_text_is_in_no_loss() -> None:
    with served(speech) as gateway:
        episode = gateway.open()
        first = episode.chat(user("What?"), seed=1)["choices"][0]["message"]
        second = episode.chat(user("What?"), first, user("Again."), seed=2)["choices"][0]["message"]
        changed = {**first, "content": first["content"].strip()}
        assert changed != first
        episode.chat(user("What?"), changed, user("Again."), second, user("More."))
        check_record(episode, gateway)
        one, fork = episode.trajectories
        assert len(one.turns) == 2 and len(fork.turns) == 1
        context = fork.token_ids[~fork.loss_mask].tolist()
        assert gateway.tokenizer.decode(context).count("<|im_start|>assistant") == 3
        assert fork.prefix.parent == 0, "it shares the beginning"


def test_messages_are_found_however_a_client_spells_them() -> None:
    with served(speech) as gateway:
        episode = gateway.open()
        first = episode.chat(user("What?"))["choices"][0]["message"]
        text = first["content"]
        spelled = {"role": "assistant", "content": [{"type": "text", "text": text}], "tool_calls": None, "audio": None}
        episode.chat(user("What?"), spelled, user("Again."))
        episode.chat({"role": "developer", "content": "Be brief."}, user("What?"))
        turns = [len(each.turns) for each in episode.trajectories]
        assert turns == [2, 1]


def test_the_same_call_twice_gives_two_branches() -> None:
    with served(speech) as gateway:
        episode = gateway.open()
        for seed in (1, 2):
            episode.chat(user("What?"), seed=seed)
        assert check_record(episode, gateway) == (2, 1)
        assert [each.prefix.parent for each in episode.trajectories][1:] == [0]
