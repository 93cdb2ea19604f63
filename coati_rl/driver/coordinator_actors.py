"""Make a run's coordinator: a Ray actor on the driver's node, or of a job on this machine in the driver itself."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.checkpoint.best import best_checkpoint
from coati_rl.checkpoint.ledger_files import LEDGER, delete_ledger
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.config import Config
from coati_rl.config.thresholds import thresholds
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.coordinator.dataset_coordinator import TRAIN, DatasetCoordinator, DatasetRunSettings
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.logprob_mismatch import Precision
from coati_rl.coordinator.reference_pass import FILE as REFERENCE_FILE
from coati_rl.coordinator.reference_pass import ReferencePass, model_key
from coati_rl.coordinator.run_state import RunStart
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.coordinator.take_over import read_left_state
from coati_rl.disk import disk_errors
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.preflight.prepared_run import Prepared
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.run_dir import RunPaths
from coati_rl.reading.prompt_source import probe_tokens

if TYPE_CHECKING:
    from coati_rl.preflight.prepare_offline import PreparedDataset


_BEGIN_S = 20.0  # for a coordinator that begins again to write its ledger's first segment


class CoordinatorActor(Coordinator):
    """Coordinate a run with producers."""

    def __init__(
        self, prepared: Prepared, paths: RunPaths, context: ActorContext, *, takes_over_after: int | None = None
    ) -> None:
        """Begin or resume a run, or take over from its coordinator, which has ended.

        Args:
            prepared: the run.
            paths: of its files.
            context: of this process.
            takes_over_after: number of the ledger's segment before the run's first one; None: the run begins here.
        """
        enter_actor(context)
        config, source = prepared.config, prepared.source
        if source is None:
            raise AssertionError("a source is None in a dry run only")
        tasks = {task: prompts.prompts for task, prompts in prepared.evaluation.items()}
        precision: Precision = "bf16" if prepared.plan.precision == "bf16" else "fp32"
        settings = coordinator_settings(config, precision=precision, tasks=prepared.tasks)
        evaluation = EvaluationRounds(
            tasks,
            paths.evaluation,
            plan=settings.sampling_plans["eval"],
            best=best_checkpoint(config.run.keep_best, paths.checkpoints, paths.evaluation),
            correct_from=thresholds(config),
        )
        start = RunStart(probe=probe_tokens(source.first(settings.max_probe_tokens), settings.max_probe_tokens))
        left = None
        if takes_over_after is not None:
            left = read_left_state(paths.run_dir / LEDGER, after=takes_over_after)
        if (resume := prepared.resume) is not None and left is None:
            start = replace(
                start,
                position=resume.position,
                untrained=resume.untrained,
                recovered=resume.recovered,
                has_changed=bool(resume.changes),
            )
        super().__init__(
            settings,
            source,
            evaluation,
            RolloutRecorder(paths.rollouts, config.run.rollout_detail, keep=config.run.keep_rollouts),
            start,
            _ledger(config, paths),
            left,
        )
        if takes_over_after is not None and left is None:  # of those that write nothing one is replaced, not each
            self.flush(timeout_s=_BEGIN_S)


def _ledger(config: Config, paths: RunPaths) -> LedgerWriter | None:
    """Return the ledger's writer; without one, a ledger of the run before its resumption is deleted."""
    directory = paths.run_dir / LEDGER
    if config.run.ledger:
        return LedgerWriter(directory, max_bytes=int(config.run.ledger_max_gb * 10**9))
    with disk_errors(directory):
        delete_ledger(directory)
    return None


class DatasetCoordinatorActor(DatasetCoordinator):
    """Coordinate a job on a dataset."""

    def __init__(self, prepared: "PreparedDataset", paths: RunPaths, context: ActorContext) -> None:
        enter_actor(context)
        super().__init__(**_of_dataset(prepared, paths))


def dataset_coordinator(prepared: "PreparedDataset", paths: RunPaths) -> DatasetCoordinator:
    """Return the coordinator of a job on a dataset, for the driver's own process."""
    return DatasetCoordinator(**_of_dataset(prepared, paths))


def _of_dataset(prepared: "PreparedDataset", paths: RunPaths) -> dict[str, Any]:
    """Return the arguments of a job's coordinator."""
    from coati_rl.preflight.prepare_offline import dataset_settings  # imports torch, which a run with producers lacks

    config, resume = prepared.config, prepared.resume
    sizes, state = dataset_settings(config, prepared.mixing), resume.data_state if resume else None
    reference = None
    if config.precomputes_reference:
        sets = {TRAIN: prepared.train, **prepared.evaluation}
        path, model = paths.run_dir / REFERENCE_FILE, model_key(Path(config.reference_model))
        reference = ReferencePass(sets, sizes, path, model=model)
    settings = DatasetRunSettings(
        job=config.JOB,
        num_trainers=config.parallel.num_trainers,
        trainers_per_dp_rank=sizes.trainers_per_dp_rank,
        save_interval=sizes.save_interval,
        eval_interval=config.run.eval_interval if config.run.eval_interval > 0 else None,
        evaluation_dir=paths.evaluation,
        best=best_checkpoint(config.run.keep_best, paths.checkpoints, paths.evaluation),
    )
    return {
        "settings": settings,
        "source": DatasetSource(prepared.train, sizes, resumed=state),
        "evaluation": prepared.evaluation,
        "reference": reference,
        "last_evaluated": -1 if state is None else int(state["last_evaluated"]),
        "time_s": 0.0 if state is None else float(state["time_s"]),
    }
