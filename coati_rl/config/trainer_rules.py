"""The rules of the trainers' layout, which are the same in every training job."""

from collections.abc import Iterator

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
