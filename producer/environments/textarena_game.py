"""Play a game of textarena (--env textarena:GAME), for one player.

The game's texts are the user's messages, and its reward is given at the end. Games take their chance from the global
random generators; each episode has a state of these to itself, which is put in place while the game computes.
"""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.text import shorten
from producer.environments.episode import Action, EpisodeTask, Message, Step

PREFIX = "textarena:"
_ASK_A_MODEL = ("GuessWho", "TwentyQuestions", "Debate", "ScenarioPlanning", "Crosswords")  # with a key
_RANDOM = threading.RLock()  # the global generators are of one game


class _NeedsDownloadError(Exception):
    """Report that a game downloads data."""


class TextArenaEpisode:
    """Implement `Episode` with a game.

    Args:
        game: its id, such as GuessTheNumber-v0.
        arguments: of the game, by name, in place of its own.
    """

    def __init__(self, game: str, arguments: Mapping[str, Any]) -> None:
        self._game = game
        self._arguments = arguments
        self._random: tuple[Any, Any] | None = None
        self._env: Any = None

    def reset(self, task: EpisodeTask) -> list[Message]:
        """Begin with the task's seed. Returns: the row's system prompt, and the game's first text."""
        with self._own_random():
            self._env = _make(self._game, self._arguments)
            random.seed(task.seed)
            np.random.seed(task.seed)
            self._env.reset(num_players=1, seed=task.seed)
            text = self._read()
        system = [message for message in task.messages if message["role"] == "system"]
        return [*system, {"role": "user", "content": text}]

    def step(self, action: Action) -> Step:
        """Make a move."""
        with self._own_random():
            is_done, _ = self._env.step(action=action.text)
            if not is_done:
                return Step(observation=[{"role": "user", "content": self._read()}], reward={})
            rewards, about = self._env.close()
        return Step(reward=rewards[0], done=True, info=dict(about[0]))

    def close(self) -> None:
        """Free nothing."""

    @property
    def is_for_one(self) -> bool:
        """Return True if the game, which has begun, is one for one player; some begin with fewer than they need."""
        from textarena import SinglePlayerState

        return isinstance(self._env.state, SinglePlayerState)

    def _read(self) -> str:
        """Return what the game has said since; the player's own moves are in the conversation."""
        from textarena import ObservationType

        _, said = self._env.get_observation()
        return "\n".join(text for _, text, kind in said if kind is not ObservationType.PLAYER_ACTION)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _RANDOM:
            others = random.getstate(), np.random.get_state()
            if self._random is not None:
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            try:
                yield
            finally:
                self._random = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


def check_game(game: str, arguments: Mapping[str, Any]) -> None:
    """Begin a game once. Raises: ConfigError for one that cannot be played here, which names the cause."""
    name = f"--env {PREFIX}{game}"
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(f"{name}: needs the package textarena ({error}); pip install 'coati-rl[textarena]'") from None
    if game not in textarena.envs.registration.ENV_REGISTRY:
        raise ConfigError(f"{name}: textarena {textarena.__version__} has no such game; GuessTheNumber-v0 is one")
    if game.startswith(_ASK_A_MODEL):
        raise ConfigError(f"{name}: asks a model of another service, with a key; choose another game")
    task = EpisodeTask(
        uid="", messages=(), prompt="", ground_truth="", columns={}, seed=0, episode=0, purpose="train"
    )  # fmt: skip
    try:
        episode = TextArenaEpisode(game, arguments)
        episode.reset(task)
        is_for_one = episode.is_for_one
    except _NeedsDownloadError:
        raise ConfigError(f"{name}: downloads word lists as it starts; choose another game") from None
    except AssertionError as error:  # of the number of players
        raise ConfigError(f"{name}: is not for one player, and there is no opponent ({shorten(error)})") from error
    except TypeError as error:
        raise ConfigError(f"--env-arg: {name} does not take these: {shorten(error)}") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {shorten(error, 200)}"
        raise ConfigError(f"{name}: cannot be started for one player: {cause}") from error
    if not is_for_one:
        raise ConfigError(f"{name}: is not for one player, and there is no opponent")


def _make(game: str, arguments: Mapping[str, Any]) -> Any:
    """Make a game whose observations are its new messages alone; those that repeat them are wrappers."""
    import nltk
    import textarena

    download, nltk.download = nltk.download, _no_download
    try:
        made = textarena.make(game, **arguments)
    finally:
        nltk.download = download
    wrappers = []
    while isinstance(made, textarena.Wrapper):
        wrappers.append(type(made))
        made = made.env
    for wrapper in reversed(wrappers):
        if issubclass(wrapper, textarena.ActionWrapper):
            made = wrapper(made)
    return made


def _no_download(*_: Any, **__: Any) -> NoReturn:
    raise _NeedsDownloadError
