"""Define the environment variables of a trainer's process, which libraries read when it starts."""

from coati_rl.config.training import TrainingConfig
from coati_rl.processes.actor_process import HUGE_PAGES
from coati_rl.types import Device

# Bytes from which glibc maps an allocation by itself, so that it goes back to the system when it is freed.
START_THRESHOLD = 2**17  # at the start of a process
LARGEST_THRESHOLD = 2**25  # to which glibc raises it as larger ones are freed
NEVER_TRIMMED = 2**40  # bytes, free at the heap's end, that glibc returns


def trainer_environment(config: TrainingConfig, device: Device) -> dict[str, str]:
    """Return the variables of a process that will hold one trainer."""
    environment = {} if config.cluster.master_address else {"GLOO_SOCKET_IFNAME": "lo"}
    return environment | memory_environment(device, config.parallel.plugin, takes_turns=config.takes_turns)


def memory_environment(device: Device, plugin: str, *, takes_turns: bool = False) -> dict[str, str]:
    """Return the variables that tell glibc how to get and to return a CPU trainer's memory; torch has its own on a GPU.

    With FSDP2 what is freed returns to the system. Layers are gathered and freed between activations that stay. In
    glibc's heap they leave gaps that later tensors do not fit, more than sharding saves: see decision 0045. In other
    layouts few tensors come and go between them, and the heap is kept for the next micro-batch, except where trainers
    and engines share a device for the sake of memory (`takes_turns`).
    """
    if device != "cpu":
        return {}
    returns = plugin == "fsdp2" or takes_turns
    threshold, trimmed = (START_THRESHOLD, START_THRESHOLD) if returns else (LARGEST_THRESHOLD, NEVER_TRIMMED)
    tunables = {"glibc.malloc.mmap_threshold": threshold, "glibc.malloc.trim_threshold": trimmed}
    added = "".join(f":{name}={value}" for name, value in tunables.items())
    return {name: value + added for name, value in HUGE_PAGES.items()}
