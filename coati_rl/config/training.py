"""The sections and sizes that every training job has, with producers or without."""

from abc import abstractmethod
from typing import ClassVar, Self

from pydantic import field_validator, model_validator

from coati_rl.config.cluster import ClusterConfig
from coati_rl.config.data import DatasetFields
from coati_rl.config.engine_urls import server_urls
from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.kept_weights import KeptWeights
from coati_rl.config.lora import LoraConfig
from coati_rl.config.model import ModelConfig, RouterReplay
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.sections import JobConfig
from coati_rl.config.trainers import TrainersConfig
from coati_rl.config.user_paths import OptionalPath, below_runs
from coati_rl.reward_spec import RewardActors


class TrainingRunConfig(Section):
    """Seed, outputs, intervals."""

    project: str = execution("run", "Name of the run; the default run directory is runs/<project>.", short="-p")
    run_dir: OptionalPath = execution(
        None, "Run directory. An existing one is left alone: the new run is numbered, unless -cp goes on in it."
    )
    checkpoint_path: OptionalPath = execution(None, "Checkpoint directory of this project to resume from.", short="-cp")
    seed: int = experiment(0, "Seed of data order, sampling and trainers.", ge=0)
    eval_interval: int = execution(
        -1, "Optimizer steps between evaluations; -1: before the first step and after the last one only.", short="-ei"
    )
    save_interval: int = execution(100, "Optimizer steps between checkpoints; -1 saves at the end only.", short="-si")
    keep_checkpoints: int | None = execution(
        None, "Checkpoints kept; older ones are deleted when a new one is complete. Default: all.", ge=1
    )
    keep_best: str | None = execution(
        None,
        "Metric of evaluations, such as eval/NAME/accuracy, whose best checkpoint is kept besides those of "
        "--keep-checkpoints and named checkpoints/best; the smallest of a loss, a perplexity or a kl, the largest of "
        "others.",
        metavar="METRIC",
    )
    keep_gradients: int = execution(
        1000,
        "Optimizer steps whose gradients are kept, in files of 100, as the norms and sketches that coati-rl replay "
        "compares with; 0: none.",
        ge=0,
    )
    keep_weights: str | None = execution(
        None,
        "Write the trained weights, without the optimizer's state, after N optimizer steps each and keep the last M of "
        "them, so that coati-rl replay need not train the steps before them again. Without last=M it is 10. None: none "
        "are kept beside checkpoints.",
        metavar="every=N[,last=M]",
    )
    save_on_interrupt: bool = execution(
        True, "On Ctrl-C or SIGTERM, write a checkpoint of the weights as they are, within --interrupt-grace-s."
    )
    interrupt_grace_s: float = execution(
        15.0, "Seconds from Ctrl-C or SIGTERM until what has not ended is killed; a second one kills at once.", gt=0
    )
    save_dir: OptionalPath = execution(None, "Checkpoints; default: <run-dir>/checkpoints.", short="-sd")
    eval_save_dir: OptionalPath = execution(None, "Evaluation results; default: <run-dir>/eval.", short="-esd")
    enable_profiling: bool = execution(
        False, "Write a torch profiler trace of one training step per trainer.", spelling="--enable_profiling"
    )
    wandb: bool = execution(False, "Log to Weights & Biases too.")
    plain: bool = execution(
        False, "Plain lines at a terminal, too, without the live block; so do NO_COLOR=1 and TERM=dumb."
    )

    @model_validator(mode="after")
    def _interval_is_positive_or_off(self) -> Self:
        for name in (name for name in type(self).model_fields if name.endswith("_interval")):
            value = getattr(self, name)
            if value == 0 or value < -1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use a positive number of steps, or -1 for off")
        return self

    @field_validator("project")
    @classmethod
    def _check_project(cls, name: str) -> str:
        return below_runs(name)

    @field_validator("keep_weights")
    @classmethod
    def _check_kept_weights(cls, text: str | None) -> str | None:
        if text is not None:
            KeptWeights.parse(text)
        return text

    @property
    def kept_weights(self) -> KeptWeights | None:
        """Return which steps' weights are kept for a replay; None: those of checkpoints alone."""
        return None if self.keep_weights is None else KeptWeights.parse(self.keep_weights)

    @property
    def outputs(self) -> dict[str, str | None]:
        """Return the output directories that were set, by their flags."""
        return {"--save-dir": self.save_dir, "--eval-save-dir": self.eval_save_dir}


class TrainingConfig(JobConfig):
    """The settings of a training job; without producers unless a subclass has them."""

    PASSES: ClassVar[str] = "--max-epochs"  # the flag of the number of passes over the data
    UNIT: ClassVar[int] = 1  # samples that a row of a dataset makes, which are compared in the loss

    model: ModelConfig = ModelConfig()
    data: DatasetFields = DatasetFields()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: TrainersConfig = TrainersConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: TrainingRunConfig = TrainingRunConfig()

    @property
    def dp(self) -> int:
        """Data-parallel trainer groups, each with samples of its own."""
        return self.parallel.num_trainers // self.parallel.ranks_per_group

    @property
    def num_copies(self) -> int:
        """Copies of the weights: one for each context-parallel rank of each data-parallel group."""
        return self.dp * self.parallel.context_parallel_size

    @property
    def fsdp_ranks(self) -> int:
        """Data-parallel ranks that share one copy of the weights with FSDP2; without it those that have one each."""
        return self.parallel.fsdp_size or self.num_copies

    @property
    def router_replay(self) -> RouterReplay:
        """Return what is done with the experts that engines chose: nothing in a job without producers."""
        return self.setting("router_replay", "none")

    @property
    def shares_prefixes(self) -> bool:
        """Whether tokens that samples begin with are computed once; padded rows hold one sample each."""
        return self.parallel.shared_prefix and not self.parallel.one_sample_per_row

    @property
    def takes_turns(self) -> bool:
        """Whether producers and trainers share their devices."""
        return self.setting("colocate", False)

    @property
    def num_producers(self) -> int:
        """Inference engines."""
        return self.setting("num_inferencer", 0)

    @property
    def needs_ray(self) -> bool:
        """Whether the actors are Ray's: trainers that are alone, on this machine, are its child processes."""
        alone = self.num_producers + self.reward_models.num_actors + self.parallel.ref_devices == 0
        return not alone or bool(self.cluster.master_address)

    @property
    def producer_width(self) -> int:
        """Processes of one inference engine."""
        return self.setting("producer_tensor_parallel_size", 1)

    @property
    def reward_models(self) -> RewardActors:
        """The actors of reward models."""
        return RewardActors()

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Servers that are the engines, one of each producer; empty if engines are the run's own."""
        return server_urls(self.setting("backend", ""))

    @property
    def num_devices(self) -> int:
        """GPUs of a run in GPU mode."""
        engines = 0 if self.takes_turns or self.engine_urls else self.num_producers * self.producer_width
        return engines + self.parallel.num_trainers + self.parallel.ref_devices + self.reward_models.num_gpus

    @property
    @abstractmethod
    def max_sample_tokens(self) -> int:
        """Tokens of the longest training sample."""
