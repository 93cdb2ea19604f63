"""Define the environment variables of a trainer's process, which libraries read when it starts."""

from coati_rl.config.training import TrainingConfig
from coati_rl.types import Device

# Bytes from which glibc maps an allocation by itself: its own start value, which it otherwise raises up to 32 MiB.
MMAP_THRESHOLD = 2**17


def trainer_environment(config: TrainingConfig, device: Device) -> dict[str, str]:
    """Return the variables of a process that will hold one trainer."""
    environment = {} if config.cluster.master_address else {"GLOO_SOCKET_IFNAME": "lo"}
    return environment | memory_environment(device, config.parallel.plugin)


def memory_environment(device: Device, plugin: str) -> dict[str, str]:
    """Return the variables with which FSDP2's trainers on a CPU return to the system what they free.

    Layers are gathered and freed between activations that stay. In glibc's heap they leave gaps that later tensors do
    not fit, more than sharding saves: see decision 0045. Fresh memory costs page faults, so that other layouts, in
    which few tensors come and go, keep the heap. On a GPU torch keeps tensors in memory of its own.
    """
    return {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD)} if (device, plugin) == ("cpu", "fsdp2") else {}
