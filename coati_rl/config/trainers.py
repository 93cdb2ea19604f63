"""How many trainers a job has, how they share a model out, and what they keep in memory."""

from typing import Any, Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, execution

PluginName = Literal["hybrid", "fsdp2"]
Offloaded = Literal["optimizer", "reference", "teacher", "old", "all"]
LAYOUT_FIELDS = (
    "plugin",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "zero_stage",
    "fsdp_size",
    "context_parallel_size",
    "expert_parallel_size",
)


class TrainersConfig(Section):
    """T trainers, how a model is split over them, and the batch sizes."""

    num_trainers: int = execution(1, "Trainer processes (T).", short="-t", ge=1)
    train_batch_size: int = execution(
        32, "Rows of the dataset per optimizer step per dp group (tbs).", short="-tbs", ge=1
    )
    train_microbatch_size: int = execution(
        2, "Rows per forward/backward (tmbs); the gradient does not depend on it.", short="-tmbs", ge=1
    )
    max_tokens_per_microbatch: int | None = execution(
        None,
        "Tokens per forward/backward at most, padding included; default: only -tmbs bounds it, on GPUs without -tmbs "
        "16384 tokens, fewer where memory asks for it, or a longest sample.",
        ge=2,
    )
    one_sample_per_row: bool = execution(False, "Pad each sample to a row of its own instead of packing rows.")
    shared_prefix: bool = execution(
        True,
        "Compute the tokens that a prompt's samples begin with once, in rows that hold them together even if they are "
        "more than -tmbs; only --max-tokens-per-microbatch cuts them. Padded rows, and models other than Llama, "
        "Mistral, Mixtral, OLMoE, Qwen2, Qwen3 and their mixtures of experts, go without.",
    )
    gradient_checkpointing: bool = execution(
        False,
        "Recompute activations in the backward pass instead of keeping them; on GPUs the default without -tmbs, and "
        "where no layout that may be chosen fits otherwise.",
    )
    offload_activations: bool = execution(
        False,
        "As --gradient-checkpointing, and what each layer begins with waits in host memory; no change on the CPU.",
    )
    compile_ops: bool | None = execution(
        None,
        "Compile norms, rotary embeddings, activations and the loss over the vocabulary, one kernel each "
        "(torch.compile), which takes seconds at the start; default: on GPUs. Rounding stays, sums may be of another "
        "order.",
    )
    plugin: PluginName = execution(
        "hybrid",
        "How the trainers share a model out: hybrid is ColossalAI with -tp, -pp and -zero; fsdp2 shards weights, "
        "gradients and optimizer states over all of them, as ZeRO stage 3 does, or with -tp each rank's part of the "
        "tensors. On GPUs without --plugin, -tp, -pp and -zero the plan chooses the fastest of all that fits.",
    )
    fsdp_size: int = execution(
        0,
        "With --plugin fsdp2, trainers of equal -tp rank that share one copy of the weights, gradients and optimizer "
        "states; gradients are summed over the copies once a step. 0: all of them share one.",
        ge=0,
    )
    tensor_parallel_size: int = execution(1, "Trainer tensor parallelism.", short="-tp", ge=1)
    pipeline_parallel_size: int = execution(1, "Trainer pipeline parallelism.", short="-pp", ge=1)
    context_parallel_size: int = execution(
        1,
        "Trainers that share each row: its tokens are cut over so many, which gather each other's keys and values in "
        "every layer. Of Llama, Mistral, Mixtral, OLMoE, Qwen2, Qwen3 and their mixtures of experts. "
        "--max-tokens-per-microbatch counts the tokens of them all.",
        spelling="--context-parallel",
        ge=1,
    )
    expert_parallel_size: int = execution(
        1,
        "With --plugin fsdp2, trainers that share the experts of each layer out: tokens go to the trainers that hold "
        "their experts, and back, and no trainer gathers the others' experts.",
        spelling="--expert-parallel",
        ge=1,
    )
    zero_stage: int = execution(
        0,
        "Trainer ZeRO stage: 1 shards optimizer states over dp, 2 gradients too; what stage 3 does is --plugin fsdp2.",
        short="-zero",
        ge=0,
        le=2,
    )
    offload: tuple[Offloaded, ...] = execution(
        (),
        "What lies in host memory while trainers do not use it, on the CPU in a file of the run's directory: the "
        "optimizer's states and masters outside of its step, a reference, a teacher or the policy before the update "
        "while they do not score, or all of these. Several are given one after the other.",
    )

    ref_devices: int = execution(
        0,
        "Devices for the reference and the teacher alone, each with a whole copy that answers the trainers; 0: they "
        "lie on the trainers.",
        ge=0,
    )

    @property
    def ranks_per_group(self) -> int:
        """Trainers that compute the same samples together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def recomputes_activations(self) -> bool:
        """Whether the backward pass computes each decoder layer's activations again."""
        return self.gradient_checkpointing or self.offload_activations

    @property
    def group_formula(self) -> str:
        """`ranks_per_group` in the letters of messages."""
        return "tp * pp * cp" if self.context_parallel_size > 1 else "tp * pp"

    @field_validator("offload", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part for part in value.replace(",", " ").split()) if isinstance(value, str) else value
