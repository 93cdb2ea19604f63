"""Check what adapters are combined with: what they do not allow is refused."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.named_values import named_values
from coati_rl.config.training import TrainingConfig

MAX_ENGINE_RANK = 512  # vLLM's


def lora_problems(config: TrainingConfig) -> Iterator[str]:
    """Why adapters cannot be trained like this, each with a remedy."""
    lora = config.lora
    if not lora.is_on:
        return
    if lora.load_in_4bit:
        yield from _four_bit_problems(config)
    update = config.control.reference_update if isinstance(config, Config) else None
    if update is not None:
        yield (
            f"--reference-update {update} with --lora-rank: the reference is the model without the adapters, which "
            "does not move; leave it out, or train the weights"
        )
    if lora.lora_sync == "adapter":
        yield from _sync_problems(config)


def _sync_problems(config: TrainingConfig) -> Iterator[str]:
    """Return why engines cannot get the adapters alone."""
    flag = "--lora-sync adapter"
    if not isinstance(config, Config):
        yield f"{flag}: has no effect, as there are no engines; leave it out"
        return
    rank, sampling = config.lora.lora_rank, config.sampling
    if sampling.backend == "transformers":
        yield f"{flag} with -b transformers: it computes without adapters; use --lora-sync merged, or -b vllm"
    if sampling.quantization is not None or named_values(sampling.engine_arg).get("quantization_config") is not None:
        yield (
            f"{flag} with a quantized engine: its base would not be the trainers'; use --lora-sync merged, or leave "
            "--quantization out"
        )
    if rank is not None and rank > MAX_ENGINE_RANK:
        yield f"{flag} with --lora-rank {rank}: vLLM takes ranks up to {MAX_ENGINE_RANK}; use --lora-sync merged"


def _four_bit_problems(config: TrainingConfig) -> Iterator[str]:
    """Why a model in 4 bits cannot be trained in this layout: blocks of numbers with one scale are not cut."""
    parallel, lora = config.parallel, config.lora
    if lora.lora_sync == "adapter":
        yield (
            "--load-in-4bit with --lora-sync adapter: the engines' base would not be the trainers'; use --lora-sync "
            "merged, or leave --load-in-4bit out"
        )
    if lora.export == "merged":
        yield (
            "--load-in-4bit with --export merged: on the model as it is the adapter is another one than was trained; "
            "leave one of them out"
        )
    if parallel.plugin == "fsdp2":
        yield "--load-in-4bit with --plugin fsdp2: its rows are not sharded; use --plugin hybrid, or leave it out"
    if parallel.tensor_parallel_size > 1:
        yield (
            f"--load-in-4bit with -tp {parallel.tensor_parallel_size}: weights in 4 bits are not cut; use -tp 1, with "
            "-pp or copies of the model, or leave it out"
        )
