"""Define the configuration of batch inference (`coati-rl generate`): prompts, sampling, scores, output."""

from typing import Any, ClassVar, Literal

from coati_rl.config.config import Config
from coati_rl.config.data import PromptFields
from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.model import ModelConfig
from coati_rl.config.named_values import NamedValues
from coati_rl.config.parallel import ParallelConfig
from coati_rl.config.reward import RewardConfig, RewardType
from coati_rl.config.sampling import SamplingConfig, StopTexts, Temperature, own_engine
from coati_rl.config.sections import JobConfig
from coati_rl.config.user_paths import OptionalPath
from coati_rl.reward_spec import NO_REWARD


def shared_field(section: type[Section], name: str) -> Any:
    """Return a field of a reinforcement learning run, with its flag, help, default and bounds."""
    return section.model_fields[name]


class GenerateDataConfig(PromptFields):
    """Prompts."""


class GenerateSamplingConfig(Section):
    """Engine and sampling distribution."""

    backend: Literal["vllm", "transformers", "fake"] = own_engine()
    num_generations: int = experiment(1, "Samples per prompt.", short="-g", ge=1)
    temperature: Temperature = experiment(1.0, "Sampling temperature; 0 is greedy.", short="-temp", ge=0)
    top_k: int | None = shared_field(SamplingConfig, "top_k")
    top_p: float = shared_field(SamplingConfig, "top_p")
    min_p: float = shared_field(SamplingConfig, "min_p")
    repetition_penalty: float = experiment(
        1.0,
        "Divide positive logits of tokens that came before, in prompt or response, by this, and multiply negative "
        "ones; 1: none.",
        gt=0,
    )
    max_new_tokens: int = shared_field(SamplingConfig, "max_new_tokens")
    stop: StopTexts = shared_field(SamplingConfig, "stop")
    seed: int = experiment(0, "Seed of sampling; each sample has a seed of its own, which follows from it.", ge=0)


class GenerateRewardConfig(RewardConfig):
    """Rewards, the processes that compute them, and the limits of programs that a model wrote."""

    reward_type: RewardType = experiment(
        NO_REWARD, "Scores of the responses, as in a run (docs/rewards.md); none: they are not scored.", short="-rt"
    )


class OutputConfig(Section):
    """The file that is written, and which samples."""

    output: OptionalPath = execution(
        None,
        "JSON lines are written here, and to FILE.progress what is done: an interrupted command goes on if repeated.",
        short="-o",
        metavar="FILE",
    )
    overwrite: bool = execution(False, "Replace the output file of another command.")
    best_of: bool = experiment(
        False, "Write the sample with the highest reward of each prompt only.", needs={"reward_type": ()}
    )
    pairs: bool = experiment(
        False,
        "Write preference pairs: the samples of a prompt with the highest and the lowest reward.",
        needs={"reward_type": ()},
    )
    min_reward: float | None = experiment(
        None,
        "Leave samples with a lower reward out; of pairs, those whose better sample has a lower one.",
        needs={"reward_type": ()},
    )
    reward_template: str | None = experiment(
        None,
        "Text that takes the place of the last user message of a written row, with {input} for the message and "
        "{reward} for the sample's reward: for conditional supervised fine-tuning.",
        needs={"reward_type": ()},
    )
    max_failure_rate: float = execution(
        0.1, "Share of prompts that cannot be answered past which the command stops.", ge=0, le=1
    )


class EngineConfig(Section):
    """The inference engine of this process."""

    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", "Where the engine runs; auto takes a GPU if there is one."
    )
    inference_microbatch_size: int = execution(32, "Prompts in flight, of g samples each.", short="-imbs", ge=1)
    producer_tensor_parallel_size: int = shared_field(ParallelConfig, "producer_tensor_parallel_size")
    gpu_memory_utilization: float = execution(0.9, "Share of a GPU's memory that vLLM takes.", gt=0, lt=1)
    max_num_seqs: int | None = shared_field(SamplingConfig, "max_num_seqs")
    block_size: int | None = shared_field(SamplingConfig, "block_size")
    quantization: str | None = experiment(
        None, "Method by which vLLM quantizes the weights. Default: none.", needs={"backend": ("vllm",)}
    )
    enforce_eager: bool | None = shared_field(SamplingConfig, "enforce_eager")
    engine_arg: NamedValues = shared_field(SamplingConfig, "engine_arg")
    stall_timeout_s: float = execution(
        1800.0, "If no prompt is finished for so long, the command stops, seconds.", gt=0
    )


class GenerateConfig(JobConfig):
    """The settings of batch inference, each validated alone; `check_generate` validates them together."""

    COMMAND: ClassVar[str] = "coati-rl generate"
    SUMMARY: ClassVar[str] = "Batch inference: samples of each prompt of a dataset, scored by rewards, as JSON lines."

    model: ModelConfig = ModelConfig()
    data: GenerateDataConfig = GenerateDataConfig()
    sampling: GenerateSamplingConfig = GenerateSamplingConfig()
    reward: GenerateRewardConfig = GenerateRewardConfig()
    output: OutputConfig = OutputConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def is_scored(self) -> bool:
        """Return True if responses get scores."""
        return self.reward.reward_type != NO_REWARD

    @property
    def max_sequences(self) -> int:
        """Samples that are generated at a time."""
        return self.engine.inference_microbatch_size * self.sampling.num_generations

    def as_run(self) -> Config:
        """Return these settings as those of a reinforcement learning run, from which prompts and scorers are made."""
        known = Config.fields()
        return Config().with_changes(**{name: value for name, value in self.values().items() if name in known})
