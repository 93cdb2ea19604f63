"""Sizes: how many processes, how prompts are cut into batches, and the Ray cluster they run on."""

from typing import Literal

from pydantic import BaseModel

from coati_rl.config.fields import flag

PluginName = Literal["hybrid", "fsdp2"]


class ParallelConfig(BaseModel):
    """P producers, T trainers, and the batch sizes of DESIGN's version algebra."""

    num_trainers: int = flag(2, "Trainer processes (T).", short="-t", ge=1)
    num_inferencer: int = flag(2, "Inference engines (P).", short="-i", ge=1)
    inference_batch_size: int = flag(64, "Prompts per producer per rollout step (ibs).", short="-ibs", ge=1)
    inference_microbatch_size: int = flag(
        8, "Prompts in flight per producer (imbs), of g samples each.", short="-imbs", ge=1
    )
    train_batch_size: int = flag(32, "Prompts per optimizer step per dp group (tbs).", short="-tbs", ge=1)
    train_minibatch_size: int = flag(
        8, "Prompts per dp group gathered before a forward pass (tMbs); the gradient does not depend on it.",
        short="-tMbs", ge=1,
    )  # fmt: skip
    train_microbatch_size: int = flag(
        2, "Samples per forward/backward (tmbs); the gradient does not depend on it.", short="-tmbs", ge=1
    )
    max_tokens_per_microbatch: int | None = flag(
        None,
        "Tokens per forward/backward at most, padding included; default: only -tmbs bounds it, on GPUs without -tmbs "
        "16384 tokens or a longest sample.",
        ge=2,
    )
    one_sample_per_row: bool = flag(False, "Pad each sample to a row of its own instead of packing rows.")
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass instead of keeping them; on GPUs the default without -tmbs."
    )
    plugin: PluginName = flag(
        "hybrid",
        "How the trainers share a model out: hybrid is ColossalAI with -tp, -pp and -zero; fsdp2 shards weights, "
        "gradients and optimizer states over all of them, as ZeRO stage 3 does.",
    )
    tensor_parallel_size: int = flag(1, "Trainer tensor parallelism.", short="-tp", ge=1)
    pipeline_parallel_size: int = flag(1, "Trainer pipeline parallelism.", short="-pp", ge=1)
    zero_stage: int = flag(
        0,
        "Trainer ZeRO stage: 1 shards optimizer states over dp, 2 gradients too; what stage 3 does is --plugin fsdp2.",
        short="-zero",
        ge=0,
        le=2,
    )
    producer_tensor_parallel_size: int = flag(1, "Tensor parallelism of each engine.", short="-ptp", ge=1)
    gpu_memory_utilization: float = flag(
        0.85, "Share of an engine GPU's memory that vLLM takes; staging new weights takes more.", gt=0, lt=1
    )
    n_behind: int = flag(
        0, "Rollout steps that producers may run ahead; bounds staleness in syncs. 0 is lockstep.", short="-nb", ge=0
    )
    ray_dir: str | None = flag(
        None,
        "Directory in which a Ray started here keeps sockets and logs, in one of the run's own; default: temporary.",
        spelling="--ray_dir",
    )
    master_address: str | None = flag(
        None, "Address of a running Ray cluster's head; default: start Ray here.", spelling="--master_address"
    )
    master_port: int = flag(
        0,
        "Port at which the trainers meet; default: a free one, and none where Ray is started here.",
        spelling="--master_port",
        ge=0,
        le=65535,
    )
