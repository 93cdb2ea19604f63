"""Play games of textarena, as --env textarena:GAME does."""

import random
import re
import sys

import numpy as np
import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Action, EpisodeTask
from producer.environments.own_episode import episode_factory
from producer.made_environment import check_environment


def checked(name, *arguments):
    config, _ = parse(["--env", name, *arguments])
    check(config)
    check_environment(config)
    return config.environment


def refusal(name, *arguments):
    with pytest.raises(ConfigError) as caught:
        checked(name, *arguments)
    return str(caught.value)


@pytest.fixture
def limits():
    return RunLimits(model="", chat_template=None, max_turns=9, max_tokens=9)


def test_a_game_is_played_to_its_end_and_gives_its_reward(play_file, template):
    def answer(context):
        guesses = [int(guess) for guess in re.findall(r"I guess \[(\d+)\]", context)]
        hints = re.findall("The target number is (higher|lower)", context)
        low, high = 1, 20
        for guess, hint in zip(guesses, hints, strict=True):
            low, high = (low, guess - 1) if hint == "lower" else (guess + 1, high)
        return f"I guess [{(low + high) // 2}]"

    done = play_file("textarena:GuessTheNumber-v0", answer, "--max-turns", "6")
    assert done.error is None
    for episode, trajectory in enumerate(done.trajectories):
        assert trajectory.turns[-1].finish_reason == "stop"
        assert [reward.value for reward in trajectory.rewards] == [1.0]
        assert (done.scores[episode].reward, done.scores[episode].verdict) == (1.0, "ok")
        assert done.records[episode]["turns"][-1]["info"]["reason"].startswith("Congratulations!")
        assert "The target number is" in template.decode(trajectory.token_ids.tolist())
        assert trajectory.loss_mask.sum() == sum(turn.end - turn.start for turn in trajectory.turns)


def test_moves_that_are_not_allowed_end_a_game_with_its_reward(play_file):
    done = play_file("textarena:GuessTheNumber-v0", lambda context: "hm")
    assert [len(each.turns) for each in done.trajectories] == [2, 2]
    assert [score.reward for score in done.scores.values()] == [0.0, 0.0]
    assert done.records[0]["turns"][-1]["info"]["invalid_move"] is True


def halving(episode, task):
    """Play by halves. Returns: the moves and the last step."""
    text = episode.reset(task)[-1]["content"]
    assert text.startswith("You are Player 0. You are playing Guess The Number.")
    low, high, moves = 1, 20, []
    while True:
        moves.append((low + high) // 2)
        step = episode.step(said(f"I guess [{moves[-1]}]"))
        if step.done:
            return moves, step
        hint = step.observation[-1]["content"]
        low, high = (low, moves[-1] - 1) if "lower" in hint else (moves[-1] + 1, high)
        assert re.fullmatch(r"The target number is (higher|lower)\.", hint)


def said(text):
    return Action(text=text, token_ids=(1,), finish_reason="stop", turn=0, messages=())


def task_of(seed):
    return EpisodeTask(
        uid="", messages=(), prompt="", ground_truth="", columns={}, seed=seed, episode=0, purpose="train"
    )


def test_the_seed_of_the_task_chooses_the_game_and_other_generators_are_left_alone(limits):
    make = episode_factory("textarena:GuessTheNumber-v0", {}, limits).make
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    plays = [halving(make(), task_of(seed)) for seed in range(12)]
    again = [halving(make(), task_of(seed)) for seed in range(12)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert [moves for moves, _ in plays] == [moves for moves, _ in again]
    assert len({tuple(moves) for moves, _ in plays}) > 3
    assert {step.reward for _, step in plays} == {1}


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("NoGame-v0", "--env textarena:NoGame-v0: textarena 0.7.4 has no such game"),
        ("Hangman-v0", "--env textarena:Hangman-v0: downloads word lists as it starts"),
        ("TwentyQuestions-v0", "--env textarena:TwentyQuestions-v0: asks a model of another service, with a key"),
        ("TicTacToe-v0", "--env textarena:TicTacToe-v0: is not for one player, and there is no opponent"),
        ("PublicGoodsGame-v0", "--env textarena:PublicGoodsGame-v0: is not for one player, and there is no opponent"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_by_name(game, message):
    assert message in refusal(f"textarena:{game}")


def test_a_game_takes_its_arguments():
    assert checked("textarena:GuessTheNumber-v0", "--env-arg", "max_number=5").arguments == {"max_number": 5}
    assert "does not take these" in refusal("textarena:GuessTheNumber-v0", "--env-arg", "size=5")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    assert "needs the package textarena" in refusal("textarena:GuessTheNumber-v0")
    assert "coati-rl[textarena]" in refusal("textarena:GuessTheNumber-v0")
