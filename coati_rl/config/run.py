"""Set the seed, where a run writes, how often it evaluates and saves, and when it gives up."""

from coati_rl.config.fields import execution
from coati_rl.config.training import TrainingRunConfig
from coati_rl.config.user_paths import OptionalPath
from coati_rl.types import RolloutDetail


class RunConfig(TrainingRunConfig):
    """Seed, outputs, intervals, limits."""

    project: str = execution("GRPO", "Name of the run; the default run directory is runs/<project>.", short="-p")
    eval_interval: int = execution(
        -1, "Optimizer steps between evaluations, rounded up to the next weight sync; -1 is off.", short="-ei"
    )
    save_interval: int = execution(
        100,
        "Optimizer steps between checkpoints, rounded up to the next weight sync; -1 saves at the end only.",
        short="-si",
    )
    rollout_save_dir: OptionalPath = execution(None, "Rollouts as JSONL; default: <run-dir>/rollouts.", short="-rsd")
    rollout_detail: RolloutDetail = execution(
        "full", "Rollouts with token ids, log-probabilities and versions, so that a step can be recomputed, or without."
    )
    keep_rollouts: int | None = execution(
        None, "Optimizer steps whose rollouts are kept, in files of 100; older files are deleted. Default: all.", ge=1
    )
    ledger: bool = execution(
        True,
        "Finished rollouts and the coordinator's decisions, as they come, in <run-dir>/ledger: a resumed run takes up "
        "what was finished after its checkpoint.",
    )
    ledger_max_gb: float = execution(
        4.0, "GB of the ledger past which no rollouts are added to it until the next checkpoint.", gt=0
    )
    answer_interval: int = execution(
        10,
        "Optimizer steps between sampled answers in the terminal's block, TensorBoard and W&B; the first step has one, "
        "too; -1 is off.",
    )
    max_failure_rate: float = execution(
        0.1, "Share of failed or undecidable samples, over a step, past which the run stops.", ge=0, le=1
    )

    @property
    def outputs(self) -> dict[str, str | None]:
        return {**super().outputs, "--rollout-save-dir": self.rollout_save_dir}
