"""Hand shared devices over between producers and trainers, on a trainer's rank.

Consumes: orders to hand over. Waits for: the other ranks, and the engines that go to sleep. Produces: free memory for
the side whose turn begins. The side whose turn ends gives its memory up before the other one takes any.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from coati_rl.errors import CoatiError
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import WeightReceiver
from coati_rl.work import HandOverWork
from consumer.tensor_offload import TensorOffload

if TYPE_CHECKING:
    from consumer.backend import Backend
    from consumer.weight_sync.rank_role import Publication

logger = logging.getLogger(__name__)


class TrainersTurn:
    """Begin and end the trainers' turn; methods are collective over the ranks."""

    def __init__(
        self,
        backend: "Backend",
        *,
        connect: Callable[[int], WeightReceiver],
        publication: "Publication",
        directory: Path,
        timeout_s: float,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        """Begin with the producers' turn: the models give their memory up.

        Args:
            backend: holds the models.
            connect: returns the remote end of a producer id.
            publication: of weights to the producers, which commit in their turn.
            directory: where a CPU's memory is kept.
            timeout_s: for an engine to go to sleep.
            timeline: records the parts of a hand-over.
        """
        self._backend = backend
        self._connect = connect
        self._publication = publication
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._offload = TensorOffload(device=backend.device, directory=directory, flag="--colocate")
        self._offload.offload(self._tensors())

    def hand_over(self, work: HandOverWork) -> None:
        """Begin this side's turn, or end it. Raises: RunError on every rank if one has failed."""
        is_first = self._backend.layout.sender == 0
        if work.to == "trainers":
            self._publication.release()
            with self._timeline.span("engines go to sleep"):
                self._backend.parallelism.agree((lambda: self._put_to_sleep(work)) if is_first else None)
            with self._timeline.span("onload"):
                self._offload.onload()
        else:
            gc.collect()  # once a turn: cycles may hold tensors of the steps
            with self._timeline.span("offload"):
                self._backend.parallelism.agree(lambda: self._offload.offload(self._tensors()))
            if is_first:
                self._publication.start_commits()

    def close(self) -> None:
        """Give the models their memory back, whoever's turn it is: memory that is offloaded must not be read."""
        self._publication.release()
        self._offload.onload()

    def _put_to_sleep(self, work: HandOverWork) -> None:
        """Let the engines give their memory up; one that is gone has, and its loss is found elsewhere."""

        def sleep(producer: int) -> None:
            try:
                self._connect(producer).sleep(timeout_s=self._timeout_s)
            except CoatiError as error:
                logger.warning("producer %d did not go to sleep: %s", producer, error)

        if work.members:
            with ThreadPoolExecutor(len(work.members)) as pool:
                list(pool.map(sleep, work.members))

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._backend.models.values():
            yield from model.memory.tensors()
