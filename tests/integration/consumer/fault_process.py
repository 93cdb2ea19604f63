"""Run a trainer whose peer, rank 1, dies or hangs before its second step; rank 0 records the error and its time."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import _set_pg_timeout

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.errors import EngineError
from tests.integration.consumer.conftest import LAYOUTS, LEARNING_RATE
from tests.integration.consumer.samples import cut, make_samples, to_mini_batch
from tests.integration.consumer.trainer import make_trainer

TIMEOUT_S = 6.0  # of collectives once all are there
HANG_S = 60.0  # unless rank 0 has heard by then


def train_until_a_fault(rank: int, out_file: Path, model_dir: Path, layout: str, fault: str) -> None:
    """Two steps, of which the second cannot be taken together; `fault` is "die" or "hang"."""
    # The servers' default group waits longer; a trainer's actor makes it with the timeout of all other groups.
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S), None)
    precision = "bf16" if "zero" in layout else "fp32"
    backend = make_trainer(model_dir, timeout_s=TIMEOUT_S, precision=precision, **LAYOUTS[layout][1])
    place = backend.layout
    micro_batches = cut(make_samples(0)[place.dp_rank :: place.dp_size], per_micro_batch=2, packed=True)
    for step in range(2):
        if step == 1 and rank == 1:
            end = time.monotonic() + (HANG_S if fault == "hang" else 0)
            while time.monotonic() < end and not out_file.exists():
                time.sleep(0.1)
            os._exit(9)
        begin = time.monotonic()
        try:
            backend.forward_backward(to_mini_batch(micro_batches, step=step), PolicyLoss())
            backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE)
        except EngineError as error:
            heard = {"step": step, "message": str(error), "seconds": time.monotonic() - begin}
            out_file.write_text(json.dumps(heard))
            os._exit(1)
