"""Play textarena's GuessTheNumber, mostly with random guesses, as conversations for supervised fine-tuning.

In: a random generator, the game's arguments. Out: rows whose prompt the game replaces with its own text, and games that
a player of `--env textarena:GuessTheNumber-v0` reads in the same words. Most players guess numbers of the game's
range and listen to no hint; where one has guessed a number before, the game says so. The others halve what is left.
"""

import itertools
import random
from collections.abc import Mapping
from typing import Any, cast

from producer.environments.episode import Action, EpisodeTask, Message
from producer.environments.textarena_game import TextArenaEpisode

Row = dict[str, Any]
GAME = "GuessTheNumber-v0"
HALVING_SHARE = 0.15  # of the players
PROMPT = {"role": "user", "content": "Play."}  # the game's text takes its place


def make_data(
    rng: random.Random, arguments: Mapping[str, Any], *, num_train: int, num_eval: int, num_conversations: int
) -> tuple[list[Row], list[Row], list[Row]]:
    """Return (prompts to train on, held-out prompts, conversations).

    The seed of a game is that of its row, so that rows differ by their place alone.

    Args:
        arguments: of the game, by name: min_number and max_number, and max_turns if it is not the game's own.
    """
    games = [play(rng, arguments) for _ in range(num_conversations)]
    return [{"messages": PROMPT}] * num_train, [{"messages": PROMPT}] * num_eval, games


def play(rng: random.Random, arguments: Mapping[str, Any]) -> Row:
    """Return a line of sft.jsonl: one game, to its end."""
    episode = TextArenaEpisode(GAME, arguments)
    seed = rng.getrandbits(31)
    messages: list[Message] = [*episode.reset(_task(seed))]
    is_halving = rng.random() < HALVING_SHARE
    low, high = smallest, largest = arguments["min_number"], arguments["max_number"]
    for turn in itertools.count():
        guess = (low + high) // 2 if is_halving else rng.randint(smallest, largest)
        text = f"[{guess}]"
        messages.append({"role": "assistant", "content": text})
        step = episode.step(Action(text=text, token_ids=(), finish_reason="stop", turn=turn, messages=()))
        if step.done:
            break
        messages += cast(list[Message], step.observation)
        low, high = (guess + 1, high) if "higher" in messages[-1]["content"] else (low, guess - 1)
    return {"messages": messages}


def _task(seed: int) -> EpisodeTask:
    return EpisodeTask(
        uid="", messages=(), prompt="", ground_truth="", columns={}, seed=seed, episode=0, purpose="train"
    )
