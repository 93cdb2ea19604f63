"""Run supervised fine-tuning in a trainer process: the train loop on a dataset of conversations.

Consumes: the work items of a `DatasetSource`, the same on every rank. Waits for: the other ranks, in collectives.
Produces: optimizer steps, checkpoints, step records. There are no producers, so no weights are sent.
"""

from pathlib import Path

from coati_rl.data.dataset_source import DatasetSource
from coati_rl.protocols import TrainBackend
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.optim.learning_rate import LearningRate
from consumer.train_loop import TrainLoop
from consumer.train_step import TrainStep


def run_sft(
    rank: int, backend: TrainBackend, source: DatasetSource, *, learning_rate: LearningRate, checkpoint_dir: Path
) -> int:
    """Train until the dataset ends.

    Args:
        rank: of this trainer.
        backend: holds the model; restored already if the run is resumed.
        source: the same on every rank.
        learning_rate: of each optimizer step.
        checkpoint_dir: parent of the `step-N` directories.
    Returns: optimizer steps taken, those before a resume included.
    """
    train_step = TrainStep(backend, CrossEntropy(), learning_rate=learning_rate)
    loop = TrainLoop(
        rank,
        source,
        source,
        backend,
        lambda is_corrected: train_step,
        is_reporter=backend.layout.is_reporter,
        checkpoint_dir=checkpoint_dir,
    )
    return loop.run()
