"""Prepare a user's real configuration, and write the small one that is rehearsed; called in the rehearsal's worker.

Everything that a run checks before it starts is checked here, with the run's own code and messages: flags, layout and
memory of the real sizes, the model's files, tokenizer and template, every row. A rehearsal adds what a run finds later:
disk space for all checkpoints, places on all nodes, the memory of GPUs that this machine lacks.
"""

import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.config.absolute_paths import with_absolute_paths
from coati_rl.config.engine_rules import check_width
from coati_rl.config.named_paths import read_sources
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.config.training import TrainingConfig
from coati_rl.disk import free_bytes, size_text
from coati_rl.errors import ConfigError
from coati_rl.preflight.checkpoint_disk import kept_weights_total, num_checkpoints
from coati_rl.preflight.memory_check import passes
from coati_rl.preflight.placement import ClusterNode, Request, assign_nodes, explain
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.preflight.prepared_run import Prepared
from coati_rl.processes.run_dir import check_save_dir, checkpoint_bytes, checkpoint_directory
from coati_rl.reading.files import each_row
from coati_rl.reading.streamed_prompts import StreamedPrompts
from coati_rl.rehearsal.reduced import Reduced, reduced
from coati_rl.rehearsal.small_model import write_small_model
from coati_rl.samples import Sample
from coati_rl.text import count
from coati_rl.yaml_text import to_yaml

# Above this package in the order of imports, so they are named here, as the command line names them.
_PREPARE = {True: "rl_example:prepare_run", False: "consumer.__main__:prepare_job"}
_CHECK_LAYOUT = "consumer.parallel.layout_rules:check_layout"
_TRY_ROWS = "rewards.tried_rows:try_rows"

_MAX_ROWS = 2000  # training rows of a file that the small run reads again, if there are more
_EVALUATED_ROWS = 8  # of each evaluation set
_ROLES = {"model": "--model", "teacher": "--teacher", "critic_model": "--critic-model",
          "reference_model": "--reference-model"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMachine:
    """Describe the machines that the command is meant for; None: not said."""

    gpu_gib: float | None = None  # memory of the smallest GPU
    nodes: int | None = None
    gpus_per_node: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Hold what the preparation found."""

    finding: str
    plan: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Hold the files of the rehearsal."""

    config: Path
    run_dir: Path
    num_steps: int
    first_save: int
    names: dict[str, str]  # path of the rehearsal -> the user's
    notes: tuple[str, ...]
    needs_ray: bool
    num_actors: int  # trainers, engines, scorers and reward models
    num_cpus: int  # that they take
    engine_cpus: int  # that one engine takes, on one node


class Preparation:
    """Prepare one command; an object of the rehearsal's worker."""

    def __init__(self, config: TrainingConfig, machine: TargetMachine) -> None:
        """Take the command's configuration, checked by its rules, and the machines that it is meant for."""
        self._config = config
        self._machine = machine
        self._prepared: PreparedJob | None = None

    @property
    def prepared(self) -> PreparedJob:
        """Return the prepared job; `prepare` has made it."""
        if self._prepared is None:
            raise AssertionError("prepare() comes first")
        return self._prepared

    def prepare(self) -> Found:
        """Check all that a run checks before it starts. Raises: ConfigError."""
        config, machine = self._config, self._machine
        if machine.gpu_gib is not None and config.cluster.device == "auto":
            config = config.with_changes(device="cuda")
        self._prepared, warnings = pkgutil.resolve_name(_PREPARE[isinstance(config, Config)])(config, is_dry_run=True)
        prepared = self.prepared
        if not Path(prepared.config.model.model).is_dir():
            raise ConfigError(
                f"--model {prepared.config.model.model}: is not on this machine, and a rehearsal reads its config.json "
                "and its tokenizer; fetch the model, or these files alone, and give the directory"
            )
        return Found(finding=_finding(prepared), plan=tuple(prepared.plan.lines()), warnings=tuple(warnings))

    def check_machines(self) -> None:
        """Compare the real sizes with the machines that they are meant for. Raises: ConfigError."""
        prepared, machine = self.prepared, self._machine
        if machine.gpu_gib is not None:
            prepared.check_gpus(int(machine.gpu_gib * 2**30))
        check_save_dir(prepared.config, prepared.resume)
        _check_disk(prepared)
        if machine.nodes is not None:
            _check_places(prepared, machine)

    def write(self, scratch: Path) -> Written:
        """Write the small models, first rows of evaluation sets and the configuration. Raises: ConfigError."""
        prepared, run_dir = self.prepared, scratch / "run"
        flags = _model_flags(prepared.config)
        models = {directory: str(scratch / f"model-{number}") for number, directory in enumerate(flags)}
        small = reduced(
            prepared.config,
            precision=prepared.plan.precision,
            run_dir=str(run_dir),
            models=models,
            evaluation=_first_rows(prepared.config, scratch),
            max_rows=_MAX_ROWS if _can_cut_rows(prepared) else None,
            is_valid=passes(check if isinstance(prepared.config, Config) else check_offline),
        )
        for directory, flag in flags.items():
            write_small_model(
                Path(directory),
                Path(models[directory]),
                where=f"{flag} {directory}",
                check=_fits(small.config),
                num_heads=max(small.config.parallel.tensor_parallel_size, small.config.producer_width),
                num_layers=max(2, small.config.parallel.pipeline_parallel_size),
                precision=prepared.plan.precision,
            )
        return _written(small, scratch, run_dir, {path: directory for directory, path in models.items()})

    def try_rewards(self, limit_s: float) -> Any:
        """Score rows of the whole dataset; see `rewards.tried_rows`."""
        return pkgutil.resolve_name(_TRY_ROWS)(self.prepared, limit_s=limit_s)

    def load(self, directory: Path) -> str:
        """Load a checkpoint with transformers; see `rehearsal.loaded`."""
        from coati_rl.rehearsal.loaded import load_checkpoint

        return load_checkpoint(directory)


def _finding(prepared: PreparedJob) -> str:
    """Return devices, rows and steps in one line, with the row that is the longest."""
    plan = prepared.plan
    parts = [f"{count(plan.num_devices, 'device')} ({plan.device}, {plan.precision})"]
    if isinstance(prepared, Prepared):
        lengths = {prompt.uid: len(prompt.token_ids) for prompt in prepared.read_prompts}
        parts.append(f"{count(len(prepared.train.prompts), 'prompt')}, {prepared.train.num_refused} too long")
    else:
        samples: Sequence[Sample] = getattr(prepared, "train", ())
        lengths = {sample.uid: len(sample) for sample in samples} if isinstance(samples, tuple) else {}
        parts.append(count(len(samples), "sample"))
    if lengths:
        longest = max(lengths, key=lambda uid: lengths[uid])
        parts.append(f"the longest {lengths[longest]} tokens ({longest})")
    steps = plan.num_steps
    return ", ".join([*parts, "steps unknown" if steps is None else count(steps, "step")])


def _check_disk(prepared: PreparedJob) -> None:
    """Raise ConfigError if the disk cannot hold the checkpoints of the whole run."""
    config, plan = prepared.config, prepared.plan
    each, directory = checkpoint_bytes(config, plan.precision), checkpoint_directory(config)
    number, free = num_checkpoints(config, plan.num_steps) or 1, free_bytes(directory)
    if number * each <= free:
        _check_disk_of_kept_weights(prepared)
        return
    fitting = free // each
    remedy = f"--keep-checkpoints {fitting - 1}" if fitting > 1 else "more space"
    raise ConfigError(
        f"--save-interval {config.run.save_interval}: {count(number, 'checkpoint')} of about {size_text(each)} at "
        f"{directory}, where {size_text(free)} are free; use {remedy}, or another disk with --save-dir"
    )


def _check_disk_of_kept_weights(prepared: PreparedJob) -> None:
    """Raise ConfigError if the disk of the run directory cannot hold what --keep-weights writes."""
    config = prepared.config
    directory = Path(config.run.run_dir or "runs").absolute()
    needed, free = kept_weights_total(config, prepared.plan.precision), free_bytes(directory)
    if needed > free:
        raise ConfigError(
            f"--keep-weights {config.run.keep_weights}: takes about {size_text(needed)} at {directory}, where "
            f"{size_text(free)} are free; use a smaller last=M, or another disk with --run-dir"
        )


def _check_places(prepared: PreparedJob, machine: TargetMachine) -> None:
    """Raise ConfigError if the nodes cannot hold the real actors."""
    request = Request.of(prepared.config, prepared.plan.device)
    actors = request.actors
    gpus = machine.gpus_per_node if prepared.plan.device == "cuda" else 0
    cpus = machine.gpus_per_node + actors["producer"].each.cpus + actors["reward model"].number
    nodes = [
        ClusterNode(node_id=str(number), address=f"node-{number}", cpus=cpus, gpus=gpus)
        for number in range(machine.nodes or 1)
    ]
    if assign_nodes(nodes, request) is None:
        raise ConfigError(f"--nodes {machine.nodes} --gpus-per-node {gpus}: {explain(nodes, nodes, request)}")


def _model_flags(config: TrainingConfig) -> dict[str, str]:
    """Return the flags of all models of a job by their directories. Raises: ConfigError for one that is not here."""
    flat = config.flat()
    found = {str(flat[name]): flag for name, flag in reversed(_ROLES.items()) if flat.get(name)}
    found |= dict.fromkeys(config.reward_models.names, "--reward-type model:")
    for directory, flag in found.items():
        if not Path(directory).is_dir():
            raise ConfigError(f"{flag} {directory}: is not on this machine; fetch it, and give its directory")
    return found


def _can_cut_rows(prepared: PreparedJob) -> bool:
    """Whether the first rows do for a small run: tasks may have theirs at the end."""
    train = getattr(prepared, "train", ())
    prompts = getattr(train, "prompts", train)
    return len(prompts) > _MAX_ROWS and not getattr(prepared.config.data, "tasks", None) and not _is_streamed(prompts)


def _is_streamed(prompts: object) -> bool:
    return isinstance(prompts, StreamedPrompts)


def _first_rows(config: TrainingConfig, scratch: Path) -> dict[str, str]:
    """Write the first rows of each evaluation set. Returns: the files by name; generators and shares stay."""
    found = dict[str, str]()
    is_off = isinstance(config, Config) and config.run.eval_interval < 0
    for name, text in ({} if is_off else config.flat().get("eval_dataset") or {}).items():
        sources = read_sources(text)
        if any(source.is_generator for source in sources):
            found[name] = text
            continue
        path = scratch / f"eval-{len(found)}.jsonl"
        rows = (
            row
            for source in sources
            for _, row in each_row(source.path, flag="--eval-dataset", max_rows=_EVALUATED_ROWS)
        )
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
        found[name] = str(path)
    return found


def _fits(config: TrainingConfig) -> Callable[[Any], None]:
    """Return what raises ValueError for sizes of a small model that the rehearsal's layout does not divide."""
    check_layout = pkgutil.resolve_name(_CHECK_LAYOUT)

    def fits(hf_config: Any) -> None:
        check_layout(config, hf_config)
        if isinstance(config, Config):
            check_width(config, hf_config)

    return fits


def _written(small: Reduced[Any], scratch: Path, run_dir: Path, names: dict[str, str]) -> Written:
    path = scratch / "rehearsal.yaml"
    settings = with_absolute_paths(small.config.flat("json"))
    path.write_text(to_yaml(settings), encoding="utf-8")
    actors = Request.of(small.config, "cpu").actors
    num_actors, engines = sum(each.number for each in actors.values()), actors["producer"]
    return Written(
        needs_ray=small.config.needs_ray,
        num_actors=num_actors,
        num_cpus=num_actors + engines.number * (engines.each.cpus - 1),
        engine_cpus=engines.each.cpus,
        config=path,
        run_dir=run_dir,
        num_steps=small.num_steps,
        first_save=small.first_save,
        names=names,
        notes=small.notes,
    )
