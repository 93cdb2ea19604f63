"""Environment variables that must be set before an engine's process starts, since libraries read them on import."""

from coati_rl.types import Device


def engine_environment(device: Device, tensor_parallel_size: int, *, num_threads: int = 1) -> dict[str, str]:
    """For the process that will hold one engine (any backend), and so for the worker processes that it starts.

    Args:
        device: what the engine computes on.
        tensor_parallel_size: worker processes share the actor's cores when it is above 1.
        num_threads: OpenMP threads per process. Oversubscribed cores are many times slower, so pin every process.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in our thread, without processes of its own
        # On CPU its warnings are advice about preloaded allocators, once per engine.
        "VLLM_LOGGING_LEVEL": "ERROR" if device == "cpu" else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",  # two lines at every start
        "OMP_NUM_THREADS": str(num_threads),
    }
    if device == "cpu":
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for small helpers to be compiled
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine binds to the same first cores
        }
    if tensor_parallel_size > 1:
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forking a process with threads can deadlock
    return environment
