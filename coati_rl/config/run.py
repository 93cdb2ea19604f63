"""Set where a run writes, how often it evaluates and saves, and how long anything may take."""

from pydantic import BaseModel

from coati_rl.config.fields import flag
from coati_rl.types import RolloutDetail


class RunConfig(BaseModel):
    """Outputs, intervals, deadlines."""

    project: str = flag("GRPO", "Name of the run; the default run directory is runs/<project>.", short="-p")
    run_dir: str | None = flag(
        None, "Run directory. An existing one is left alone: the new run is numbered, unless -cp goes on in it."
    )
    seed: int = flag(0, "Seed of data order, sampling and trainers.", ge=0)
    eval_interval: int = flag(
        -1, "Optimizer steps between evaluations, rounded up to the next weight sync; -1 is off.", short="-ei"
    )
    save_interval: int = flag(
        100,
        "Optimizer steps between checkpoints, rounded up to the next weight sync; -1 saves at the end only.",
        short="-si",
    )
    keep_checkpoints: int | None = flag(
        None, "Checkpoints kept; older ones are deleted when a new one is complete. Default: all.", ge=1
    )
    save_on_interrupt: bool = flag(
        True, "On Ctrl-C or SIGTERM, write a checkpoint of the weights as they are, within --interrupt-grace-s."
    )
    interrupt_grace_s: float = flag(
        15.0, "Seconds from Ctrl-C or SIGTERM until what has not ended is killed; a second one kills at once.", gt=0
    )
    save_dir: str | None = flag(None, "Checkpoints; default: <run-dir>/checkpoints.", short="-sd")
    eval_save_dir: str | None = flag(None, "Evaluation results; default: <run-dir>/eval.", short="-esd")
    rollout_save_dir: str | None = flag(None, "Rollouts as JSONL; default: <run-dir>/rollouts.", short="-rsd")
    rollout_detail: RolloutDetail = flag(
        "full", "Rollouts with token ids, log-probabilities and versions, so that a step can be recomputed, or without."
    )
    enable_profiling: bool = flag(
        False, "Write a torch profiler trace of one training step per trainer.", spelling="--enable_profiling"
    )
    wandb: bool = flag(False, "Log to Weights & Biases too.")
    stall_timeout_s: float = flag(1800.0, "A run in which nothing finishes for so long is stopped, seconds.", gt=0)
    heartbeat_timeout_s: float = flag(
        30.0,
        "A producer that gives no sign of life for so long is replaced; a trainer ends the run, seconds.",
        ge=5,
    )
    phase_timeout_s: float = flag(
        60.0,
        "The same for a phase, such as an optimizer step, that takes so long and ten times its own median, seconds; "
        "the first of its kind may take ten times as long.",
        ge=1,
    )
    max_failure_rate: float = flag(
        0.1, "Share of failed or undecidable samples, over a step, past which the run stops.", ge=0, le=1
    )
