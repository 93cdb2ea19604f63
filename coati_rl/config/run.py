"""Set the seed, where a run writes, how often it evaluates and saves, and when it gives up."""

from typing import Self

from pydantic import model_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.types import RolloutDetail


class RunConfig(Section):
    """Seed, outputs, intervals, limits."""

    project: str = execution("GRPO", "Name of the run; the default run directory is runs/<project>.", short="-p")
    run_dir: str | None = execution(
        None, "Run directory. An existing one is left alone: the new run is numbered, unless -cp goes on in it."
    )
    checkpoint_path: str | None = execution(None, "Checkpoint directory of this project to resume from.", short="-cp")
    seed: int = experiment(0, "Seed of data order, sampling and trainers.", ge=0)
    eval_interval: int = execution(
        -1, "Optimizer steps between evaluations, rounded up to the next weight sync; -1 is off.", short="-ei"
    )
    save_interval: int = execution(
        100,
        "Optimizer steps between checkpoints, rounded up to the next weight sync; -1 saves at the end only.",
        short="-si",
    )
    keep_checkpoints: int | None = execution(
        None, "Checkpoints kept; older ones are deleted when a new one is complete. Default: all.", ge=1
    )
    keep_best: str | None = execution(
        None,
        "Metric of evaluations, such as eval/NAME/accuracy, whose best checkpoint is kept besides those of "
        "--keep-checkpoints and named checkpoints/best; the smallest of a loss or a perplexity, the largest of others.",
        metavar="METRIC",
    )
    save_on_interrupt: bool = execution(
        True, "On Ctrl-C or SIGTERM, write a checkpoint of the weights as they are, within --interrupt-grace-s."
    )
    interrupt_grace_s: float = execution(
        15.0, "Seconds from Ctrl-C or SIGTERM until what has not ended is killed; a second one kills at once.", gt=0
    )
    save_dir: str | None = execution(None, "Checkpoints; default: <run-dir>/checkpoints.", short="-sd")
    eval_save_dir: str | None = execution(None, "Evaluation results; default: <run-dir>/eval.", short="-esd")
    rollout_save_dir: str | None = execution(None, "Rollouts as JSONL; default: <run-dir>/rollouts.", short="-rsd")
    rollout_detail: RolloutDetail = execution(
        "full", "Rollouts with token ids, log-probabilities and versions, so that a step can be recomputed, or without."
    )
    enable_profiling: bool = execution(
        False, "Write a torch profiler trace of one training step per trainer.", spelling="--enable_profiling"
    )
    wandb: bool = execution(False, "Log to Weights & Biases too.")
    max_failure_rate: float = execution(
        0.1, "Share of failed or undecidable samples, over a step, past which the run stops.", ge=0, le=1
    )

    @model_validator(mode="after")
    def _interval_is_positive_or_off(self) -> Self:
        for name in ("eval_interval", "save_interval"):
            value = getattr(self, name)
            if value == 0 or value < -1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use a positive number of steps, or -1 for off")
        return self
