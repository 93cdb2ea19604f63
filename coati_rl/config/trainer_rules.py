"""The rules of the trainers' layout, which are the same in every training job."""

from collections.abc import Iterator
from math import gcd

from coati_rl.config.training import TrainingConfig


def zero_problems(config: TrainingConfig) -> Iterator[str]:
    """Return what ZeRO cannot be combined with."""
    parallel = config.parallel
    zero, pp = parallel.zero_stage, parallel.pipeline_parallel_size
    if zero == 2 and pp > 1:
        yield (
            f"-zero 2 with -pp {pp}: stage 2 hands a gradient out as soon as it is made, and a pipeline makes it in "
            "several backward passes; use -zero 1 or -pp 1"
        )
    if zero > 0 and config.model.precision == "fp32":
        yield (
            f"-zero {zero} with --precision fp32: ZeRO keeps float32 masters of bfloat16 weights; "
            "use --precision bf16 or -zero 0"
        )


def plugin_problems(config: TrainingConfig) -> Iterator[str]:
    """Return what FSDP2 cannot be combined with, and copies of the weights that trainers cannot share out equally."""
    parallel = config.parallel
    given = {"-pp": parallel.pipeline_parallel_size, "-zero": parallel.zero_stage}
    off = {"-pp": 1, "-zero": 0}
    others = [flag for flag, value in given.items() if value != off[flag]]
    if parallel.plugin == "fsdp2" and others:
        yield (
            f"--plugin fsdp2 with {' '.join(f'{flag} {given[flag]}' for flag in others)}: it shards weights, gradients "
            "and optimizer states over trainers, and has neither stages nor ZeRO beside; "
            f"use {' '.join(f'{flag} {off[flag]}' for flag in others)} or --plugin hybrid"
        )
    size, ranks = parallel.fsdp_size, config.num_copies
    if size and parallel.plugin != "fsdp2":
        yield (
            f"--fsdp-size {size} with --plugin {parallel.plugin}, which has no such shards; "
            "use --plugin fsdp2 or --fsdp-size 0"
        )
    elif size and ranks % size:
        fitting = [each for each in range(1, ranks + 1) if ranks % each == 0]
        below, above = [each for each in fitting if each < size], [each for each in fitting if each > size]
        remedies = " or ".join(f"--fsdp-size {each}" for each in (*below[-1:], *above[:1]))
        yield f"--fsdp-size {size}: must divide the {ranks} data-parallel trainers (T / tp); use {remedies}"
    yield from _expert_problems(config)


def _expert_problems(config: TrainingConfig) -> Iterator[str]:
    """Return what trainers that share experts out cannot be combined with."""
    parallel, ep = config.parallel, config.parallel.expert_parallel_size
    if ep == 1:
        return
    if parallel.plugin != "fsdp2":
        yield (
            f"--expert-parallel {ep} with --plugin {parallel.plugin}: tokens are exchanged between trainers that FSDP2 "
            "keeps in step; use --plugin fsdp2 or --expert-parallel 1"
        )
    elif parallel.tensor_parallel_size > 1:
        yield (
            f"--expert-parallel {ep} with -tp {parallel.tensor_parallel_size}: both share experts out; "
            "use -tp 1 or --expert-parallel 1"
        )
    elif config.fsdp_ranks % ep:
        yield (
            f"--expert-parallel {ep}: must divide the {config.fsdp_ranks} trainers that share a copy of the weights; "
            f"use --expert-parallel {gcd(ep, config.fsdp_ranks)}"
        )
