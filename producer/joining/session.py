"""Roll out prompts of a run that this machine has joined over HTTPS, from admission to the end or a signal.

Consumes: leases by HTTP. Waits for: admission, prompts, the engine. Is unblocked by: the run's answers, a signal.
Produces: groups by HTTP. A thread of its own says that it is there, another one gets the weights.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from coati_rl.config import Config
from coati_rl.config.engine_rules import answers_per_prompt
from coati_rl.errors import RunOverError
from coati_rl.processes.actor_process import ActorContext
from coati_rl.protocols import GenerationEngine, GroupScorer
from producer.joining.client import HttpCoordinator, JoinConnection
from producer.joining.received_weights import JoinedWeights
from producer.made_environment import make_environment
from producer.rollout_loop import RolloutLoop

logger = logging.getLogger(__name__)

_BEAT_S = 2.0


class JoinedSession:
    """Work for a run until it is over, or `leave` is called."""

    def __init__(self, connection: JoinConnection, config: Config, context: ActorContext) -> None:
        """Take a connection whose producer has joined."""
        self._connection, self._config, self._context = connection, config, context
        self._loop: RolloutLoop | None = None
        self._is_leaving = threading.Event()
        self._is_over = threading.Event()
        self._problem: Exception | None = None

    def leave(self) -> None:
        """Give the prompts back and end; from a signal handler or any thread."""
        self._is_leaving.set()
        if self._loop is not None:
            self._loop.leave()

    def run(self, engine: GenerationEngine, reward: GroupScorer, say: Callable[[str], None]) -> None:
        """Work. Raises: PeerLostError if the run is lost or let this producer go; what ends the engine."""
        try:
            self._work(engine, reward, say)
        except RunOverError:
            say("the run is over")

    def _work(self, engine: GenerationEngine, reward: GroupScorer, say: Callable[[str], None]) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        with ExitStack() as stack:
            stack.callback(self._is_over.set)
            number = self._admitted()
            if number is None:
                self._connection.ask("leave")
                return
            say(f"joined as producer {number}")
            weights = JoinedWeights(self._connection, engine, self._fail)
            stack.callback(weights.close)
            environment = make_environment(self._config, log_dir=self._context.log_dir)
            if environment is not None:
                stack.callback(environment.close)
            config = self._config
            self._loop = RolloutLoop(
                number,
                HttpCoordinator(self._connection),
                engine,
                reward,
                max_sequences=config.sequences_in_flight,
                group_size=answers_per_prompt(config),
                environment=environment,
                by_sample=config.sync.partial_rollouts,
                cuts_overdue=config.environment.stale_episodes == "cut",
                on_turn=self._raise_problem,
            )
            if self._is_leaving.is_set():  # came while it was made
                self._loop.leave()
            self._loop.run()
            self._connection.ask("leave" if self._loop.is_leaving else "done")
            say("has given its prompts back" if self._loop.is_leaving else "the run is over")

    def _admitted(self) -> int | None:
        """Wait for a number. Returns: None if it leaves before."""
        while not self._is_leaving.is_set():
            self._raise_problem()
            if (number := self._connection.ask("number").fields["number"]) is not None:
                return int(number)
        return None

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            try:
                self._connection.ask("beat")
            except Exception as error:  # noqa: BLE001 - the rollout loop raises it
                self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        self._problem = self._problem or error
        if self._loop is not None:
            self._loop.wake()

    def _raise_problem(self) -> Any:
        if self._problem is not None:
            raise self._problem
