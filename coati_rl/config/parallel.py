"""Set sizes of a run with producers: how many processes, and how prompts are cut into batches."""

from coati_rl.config.fields import execution
from coati_rl.config.trainers import TrainersConfig
from coati_rl.config.user_paths import OptionalPath


class ParallelConfig(TrainersConfig):
    """P producers, T trainers, how a model is split over them, and the batch sizes."""

    num_trainers: int = execution(2, "Trainer processes (T).", short="-t", ge=1)
    train_batch_size: int = execution(32, "Prompts per optimizer step per dp group (tbs).", short="-tbs", ge=1)
    train_microbatch_size: int = execution(
        2, "Samples per forward/backward (tmbs); the gradient does not depend on it.", short="-tmbs", ge=1
    )
    train_minibatch_size: int = execution(
        8, "Prompts per dp group gathered before a forward pass (tMbs); the gradient does not depend on it.",
        short="-tMbs", ge=1,
    )  # fmt: skip
    compute_all_samples: bool = execution(
        False,
        "Compute also samples that have no gradient, as their advantage is 0, so that entropy and other means are over "
        "all tokens of the loss. Without, only as many of them as the metrics need.",
    )
    num_inferencer: int = execution(2, "Inference engines (P).", short="-i", ge=1)
    max_producers: int | None = execution(
        None,
        "Engines at most: as nodes join the Ray cluster of --master_address, and leave it, so do engines; the prompts "
        "of a rollout step stay those of -i. Default: -i engines, each replaced when it is lost.",
        ge=1,
        needs={"master_address": ()},
    )
    join_port: int | None = execution(
        None,
        "Port at which producers of other machines join the run over HTTPS, without a Ray cluster: coati-rl join "
        "https://HOST:PORT. Their engines, too, only shorten a rollout step. Default: none can.",
        ge=1,
        le=65535,
    )
    join_host: str = execution(
        "127.0.0.1",
        "Address on which the run listens for them; one that other machines reach needs --join-cert.",
        needs={"join_port": ()},
    )
    join_cert: OptionalPath = execution(
        None,
        "PEM file of the certificate, and its chain, by which they know this run; default: plain HTTP, for a server of "
        "TLS in front.",
        needs={"join_port": ()},
    )
    join_key: OptionalPath = execution(None, "PEM file of the certificate's private key.", needs={"join_cert": ()})
    inference_batch_size: int = execution(64, "Prompts per producer per rollout step (ibs).", short="-ibs", ge=1)
    inference_microbatch_size: int = execution(
        8, "Prompts in flight per producer (imbs), of g samples each.", short="-imbs", ge=1
    )
    producer_tensor_parallel_size: int = execution(
        1, "Tensor parallelism of each engine.", short="-ptp", ge=1, needs={"backend": ("vllm",)}
    )
    colocate: bool = execution(
        False,
        "Producers and trainers take turns on the same devices: engines give up their memory while the trainers train, "
        "and trainers theirs while prompts are answered.",
    )
    gpu_memory_utilization: float = execution(
        0.85,
        "Share of an engine GPU's memory that vLLM takes; staging new weights takes more. Without the flag the plan "
        "chooses, at most 0.9.",
        gt=0,
        lt=1,
    )
