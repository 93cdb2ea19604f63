"""Check the settings of trainers, the same in every training job: layout, optimizer, adapters, frozen models."""

from collections.abc import Iterator
from math import gcd

from coati_rl.config.config import Config
from coati_rl.config.conflicts import conflict_problems
from coati_rl.config.held_models import frozen_models, remote_models
from coati_rl.config.needs import need_problems
from coati_rl.config.training import TrainingConfig

MAX_ENGINE_RANK = 512  # of an adapter, vLLM's


def trainer_problems(config: TrainingConfig) -> Iterator[str]:
    """Yield why trainers cannot be set up like this, each with a remedy."""
    yield from conflict_problems(config)
    yield from _copies(config)
    yield from need_problems(config)
    yield from _adapters(config)
    yield from _offload(config)
    if config.parallel.ref_devices and not remote_models(config):
        shared = config.lora.is_on and (not isinstance(config, Config) or config.algorithm.kl_coeff > 0)
        why = "with --lora-rank the reference is the base on the trainers, where it takes no memory of its own"
        yield (
            f"--ref-devices {config.parallel.ref_devices}: "
            f"{why if shared else 'there is no reference and no teacher'}; leave it out"
        )


def _copies(config: TrainingConfig) -> Iterator[str]:
    """Return copies of the weights, and of experts, that trainers cannot share out equally."""
    parallel = config.parallel
    if parallel.plugin != "fsdp2":
        return
    size, ranks, ep = parallel.fsdp_size, config.num_copies, parallel.expert_parallel_size
    if size and ranks % size:
        fitting = [each for each in range(1, ranks + 1) if ranks % each == 0]
        below, above = [each for each in fitting if each < size], [each for each in fitting if each > size]
        remedies = " or ".join(f"--fsdp-size {each}" for each in (*below[-1:], *above[:1]))
        yield f"--fsdp-size {size}: must divide the {ranks} data-parallel trainers (T / tp); use {remedies}"
    if parallel.tensor_parallel_size == 1 and config.fsdp_ranks % ep:
        yield (
            f"--expert-parallel {ep}: must divide the {config.fsdp_ranks} trainers that share a copy of the weights; "
            f"use --expert-parallel {gcd(ep, config.fsdp_ranks)}"
        )


def _adapters(config: TrainingConfig) -> Iterator[str]:
    """Return why engines cannot get the adapters alone."""
    rank = config.lora.lora_rank
    if not config.lora.is_on or config.lora.lora_sync != "adapter":
        return
    if not isinstance(config, Config):
        yield "--lora-sync adapter: has no effect, as there are no engines; leave it out"
    elif rank is not None and rank > MAX_ENGINE_RANK:
        yield (
            f"--lora-sync adapter with --lora-rank {rank}: vLLM takes ranks up to {MAX_ENGINE_RANK}; use --lora-sync "
            "merged"
        )


def _offload(config: TrainingConfig) -> Iterator[str]:
    """Return why the memory of a model cannot be given up, in one message with a remedy."""
    given, known = config.parallel.offload, {"optimizer", "all", *(frozen_models(config) - remote_models(config))}
    missing = [name for name in given if name not in known]
    if not missing:
        return
    left = [name for name in given if name in known]
    remedy = f"use --offload {','.join(left)}" if left else "leave it out"
    is_shared = config.lora.is_on and missing != ["teacher"]
    shared = ", as with --lora-rank it is the model's base, which takes no memory of its own" if is_shared else ""
    if remote := remote_models(config) & {*missing}:
        shared = f", as --ref-devices {config.parallel.ref_devices} takes it off them"
        missing = [name for name in missing if name in remote]
    yield f"--offload {','.join(given)}: trainers hold no {' and no '.join(missing)} model of its own{shared}; {remedy}"
