"""Set sizes: how many processes, how a model is split over them, and how prompts are cut into batches."""

from typing import Literal

from coati_rl.config.fields import Section, execution

PluginName = Literal["hybrid", "fsdp2"]


class ParallelConfig(Section):
    """P producers, T trainers, how a model is split over them, and the batch sizes."""

    num_trainers: int = execution(2, "Trainer processes (T).", short="-t", ge=1)
    num_inferencer: int = execution(2, "Inference engines (P).", short="-i", ge=1)
    inference_batch_size: int = execution(64, "Prompts per producer per rollout step (ibs).", short="-ibs", ge=1)
    inference_microbatch_size: int = execution(
        8, "Prompts in flight per producer (imbs), of g samples each.", short="-imbs", ge=1
    )
    train_batch_size: int = execution(32, "Prompts per optimizer step per dp group (tbs).", short="-tbs", ge=1)
    train_minibatch_size: int = execution(
        8, "Prompts per dp group gathered before a forward pass (tMbs); the gradient does not depend on it.",
        short="-tMbs", ge=1,
    )  # fmt: skip
    train_microbatch_size: int = execution(
        2, "Samples per forward/backward (tmbs); the gradient does not depend on it.", short="-tmbs", ge=1
    )
    max_tokens_per_microbatch: int | None = execution(
        None,
        "Tokens per forward/backward at most, padding included; default: only -tmbs bounds it, on GPUs without -tmbs "
        "16384 tokens or a longest sample.",
        ge=2,
    )
    one_sample_per_row: bool = execution(False, "Pad each sample to a row of its own instead of packing rows.")
    gradient_checkpointing: bool = execution(
        False, "Recompute activations in the backward pass instead of keeping them; on GPUs the default without -tmbs."
    )
    plugin: PluginName = execution(
        "hybrid",
        "How the trainers share a model out: hybrid is ColossalAI with -tp, -pp and -zero; fsdp2 shards weights, "
        "gradients and optimizer states over all of them, as ZeRO stage 3 does.",
    )
    tensor_parallel_size: int = execution(1, "Trainer tensor parallelism.", short="-tp", ge=1)
    pipeline_parallel_size: int = execution(1, "Trainer pipeline parallelism.", short="-pp", ge=1)
    zero_stage: int = execution(
        0,
        "Trainer ZeRO stage: 1 shards optimizer states over dp, 2 gradients too; what stage 3 does is --plugin fsdp2.",
        short="-zero",
        ge=0,
        le=2,
    )
    producer_tensor_parallel_size: int = execution(1, "Tensor parallelism of each engine.", short="-ptp", ge=1)
    gpu_memory_utilization: float = execution(
        0.85, "Share of an engine GPU's memory that vLLM takes; staging new weights takes more.", gt=0, lt=1
    )
