"""Define the environment variables of an engine's process, which libraries read when they are imported."""

import os
import warnings
from typing import TYPE_CHECKING

from coati_rl.processes.actor_process import HUGE_PAGES
from coati_rl.types import Device

if TYPE_CHECKING:
    from coati_rl.config.generate import EngineConfig
    from coati_rl.config.serve import ServeEngineConfig


def set_engine_environment(device: Device, flags: "EngineConfig | ServeEngineConfig") -> None:
    """Set the variables of this process, which will hold the engine of a command; OMP_NUM_THREADS stays as it is."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils\.dispatcher")
    compiles = flags.enforce_eager is False
    environment = engine_environment(device, flags.producer_tensor_parallel_size, compiles=compiles)
    os.environ.update({name: value for name, value in environment.items() if name != "OMP_NUM_THREADS"})


def engine_environment(
    device: Device, tensor_parallel_size: int, *, num_threads: int = 1, compiles: bool = False
) -> dict[str, str]:
    """Return the variables of a process that will hold one engine of any backend; its workers inherit them.

    Args:
        device: the device that the engine computes on.
        tensor_parallel_size: above 1 the engine has worker processes, which share the actor's cores.
        num_threads: OpenMP threads per process. Oversubscribed cores are many times slower, so pin every process.
        compiles: --no-enforce-eager was given; it matters on the CPU, where nothing is compiled otherwise.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in our thread, without a process of its own
        # On CPU its warnings only recommend preloaded allocators, once per engine.
        "VLLM_LOGGING_LEVEL": "ERROR" if device == "cpu" else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",  # two lines at every start
        "OMP_NUM_THREADS": str(num_threads),
    }
    if device == "cpu":
        environment |= HUGE_PAGES
        # Otherwise all engines of a machine are bound to the same cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if not compiles:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first request waits for compilation
    if tensor_parallel_size > 1:
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forking a process with threads can deadlock
    return environment
