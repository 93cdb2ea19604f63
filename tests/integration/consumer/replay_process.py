"""A trainer that takes the optimizer steps of recorded rollouts, through the real batcher and train step.

replay_process.py RANK WORLD_SIZE PORT LISTENER_FD OUT_DIR MODEL_DIR RECORDING LAYOUT,...
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.data.batcher import BatchSettings, StepBatcher
from coati_rl.types import Completion, Prompt, RolloutGroup, Score
from consumer.train_step import StepSettings, TrainStep
from tests.integration.consumer.conftest import LAYOUTS
from tests.integration.consumer.trainer import join, make_backend

PROMPTS_PER_STEP = 4
# How each layout executes the same experiment; all but the first differ in everything that must not matter.
EXECUTION = {
    "dp1": {"train_minibatch_size": 4, "train_microbatch_size": 16},
    "dp2": {"train_minibatch_size": 1, "train_microbatch_size": 3},
    "tp2": {"train_minibatch_size": 2, "train_microbatch_size": 2, "one_sample_per_row": True},
    "pp2": {"train_minibatch_size": 2, "train_microbatch_size": 8, "max_tokens_per_microbatch": 64},
    "tp2_pp2": {"train_minibatch_size": 4, "train_microbatch_size": 5},
    "pp2_dp2": {"train_minibatch_size": 2, "train_microbatch_size": 4},
}


def read_groups(recording: Path) -> list[list[RolloutGroup]]:
    """Step by step."""
    return [
        [
            RolloutGroup(
                lease_id=0,
                producer_id=0,
                prompt=Prompt(uid=group["uid"], token_ids=tuple(group["prompt"]), ground_truth=""),
                temperature=group["temperature"],
                completions=tuple(
                    Completion(
                        token_ids=np.array(sample["token_ids"], dtype=np.int32),
                        logprobs=np.array(sample["logprobs"], dtype=np.float32),
                        policy_versions=np.zeros(len(sample["token_ids"]), dtype=np.int32),
                        finish_reason="stop",
                        text="",
                    )
                    for sample in group["samples"]
                ),
                scores=tuple(
                    Score(reward=sample["reward"], answer_correct=False, format_valid=True, verdict="ok")
                    for sample in group["samples"]
                ),
            )
            for group in step
        ]
        for step in json.loads(recording.read_text())
    ]


def replay(model_dir: Path, steps: list[list[RolloutGroup]], layout: str) -> list[dict[str, Any]]:
    """The metrics of every step; empty on ranks that do not report."""
    backend = make_backend(model_dir, gradient_checkpointing=layout == "tp2_pp2", **LAYOUTS[layout][1])
    place = backend.layout
    settings = BatchSettings(
        dp=place.dp_size,
        train_batch_size=PROMPTS_PER_STEP // place.dp_size,
        loss_variation="token_level",
        **EXECUTION[layout],
    )
    loss = PolicyLoss(kl_coeff=0.1, clip_high=0.28)
    train_step = TrainStep(backend, loss, StepSettings(has_reference=True, learning_rate=1e-3))
    metrics = []
    for step, groups in enumerate(steps):
        batcher = StepBatcher(settings, step=step, learning_rate_progress=step / 10)
        size = settings.prompts_per_mini_batch
        for first in range(0, len(groups), size):
            metrics.append(train_step.run(batcher.add(groups[first : first + size])[place.dp_rank]))
    backend.close()
    return [step for step in metrics if step is not None] if place.is_reporter else []


def main() -> None:
    """One layout after another."""
    _, _, (out_dir, model_dir, recording, layouts) = join()
    for layout in layouts.split(","):
        metrics = replay(Path(model_dir), read_groups(Path(recording)), layout)
        if metrics:
            (Path(out_dir) / f"{layout}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
