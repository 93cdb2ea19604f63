"""From what a machine has to what is run on it: for each check a job, or the reason why it cannot run.

In: the probe's findings, the names of checks, whether sizes are small. Out: jobs, which are JSON, or reasons.
"""

from dataclasses import dataclass
from typing import Any

from gpu_checks.peaks import dense_bf16_peak

CHECKS = ("nccl", "ipc", "mfu", "logprob")
GIB = 2**30
CUPY_RUNTIME, CUPY_NCCL = "cupy.cuda.runtime", "cupy.cuda.nccl"

NEEDS: dict[str, dict[str, str]] = {  # check -> module -> what to say when it cannot be imported
    "nccl": {"xxhash": "xxhash", CUPY_NCCL: "cupy with NCCL (cupy-cuda12x or cupy-cuda13x, nvidia-nccl-cuXX)"},
    "ipc": {"xxhash": "xxhash", CUPY_RUNTIME: "cupy (cupy-cuda12x or cupy-cuda13x)"},
    "mfu": {
        "pydantic": "pydantic",
        "transformers": "transformers 5",
        "torch.nn.attention.varlen": "a PyTorch with varlen attention",
    },
    "logprob": {},
}
# Together 16,384: the packed step's samples, of prompt and response.
PACKED_LENGTHS = (4096, 3072, 2048, 2048, 1536, 1024, 1024, 768, 512, 256)
# What is tried in turn until the GPU's memory holds it: model shape, gradient checkpointing.
ATTEMPTS = (("qwen2-1.5b", False), ("qwen2-1.5b", True), ("qwen2-0.5b", False), ("qwen2-0.5b", True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What `probe` has found."""

    torch: str | None  # version
    gpus: list[dict[str, Any]]  # name, memory_bytes
    no_gpu: str | None  # why there is none
    nccl: int | None  # 22809 is 2.28.9
    backends: list[str]  # of the weight wire, those that need a GPU
    unavailable: dict[str, str]  # module -> why it cannot be imported
    absent: list[str]  # engines that are not installed; no check needs them


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One check in a process of its own."""

    check: str
    settings: dict[str, Any]  # of the check's function
    environment: dict[str, str]  # on top of this process's
    deadline_s: float  # after which the process and what it started are killed


def missing_need(check: str, machine: Machine) -> str | None:
    """What the check needs and the machine lacks."""
    for module, what in NEEDS[check].items():
        if module in machine.unavailable:
            return f"{what}: {machine.unavailable[module]}"
    if check == "nccl" and machine.nccl is None:
        return "a cupy that finds the NCCL library (pip package nvidia-nccl-cuXX)"
    if check == "nccl" and machine.nccl is not None and len(machine.gpus) == 1 and machine.nccl < 20500:
        return f"two GPUs, or NCCL 2.5 or newer for two ranks on one; it is {machine.nccl}"
    if check == "ipc" and "ipc" not in machine.backends:
        return "the weight wire's backend ipc, which this tree lacks"
    return None


def nccl_environment(version: int, *, num_gpus: int, rank: int) -> dict[str, str]:
    """What lets rank 0 and 1 meet: NCCL refuses two ranks of one host on one GPU."""
    environment = {"NCCL_DEBUG": "WARN"}
    if num_gpus > 1:
        return environment
    if version >= 23000:
        return environment | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    # Two hosts, as far as NCCL can tell; between hosts it uses sockets, here over the loopback.
    hosts = {"NCCL_HOSTID": f"gpu-check-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return environment | hosts


def make_job(check: str, machine: Machine, *, quick: bool) -> Job:
    """The job of a check that has all it needs."""
    settings: dict[str, Any] = {"device": "cuda:0"}
    environment: dict[str, str] = {}
    match check:
        case "nccl" | "ipc":
            settings |= {"backend": check, "receiver_device": "cuda:0", "receiver_environment": {}}
            settings |= {"num_bytes": GIB // 16 if quick else GIB, "rounds": 3 if quick else 5, "timeout_s": 20.0}
            if check == "nccl":
                num_gpus, version = len(machine.gpus), machine.nccl or 0
                settings["receiver_device"] = f"cuda:{min(1, num_gpus - 1)}"
                environment = nccl_environment(version, num_gpus=num_gpus, rank=0)
                settings["receiver_environment"] = nccl_environment(version, num_gpus=num_gpus, rank=1)
        case "mfu":
            peak = dense_bf16_peak(machine.gpus[0]["name"])
            settings |= {"attempts": list(ATTEMPTS[2:] if quick else ATTEMPTS), "rounds": 3 if quick else 5}
            settings |= {"lengths": list(PACKED_LENGTHS[-4:] if quick else PACKED_LENGTHS)}
            settings |= {"peak_tflops": peak and peak[0], "peak_source": peak and peak[1]}
            environment = {"HF_HUB_OFFLINE": "1"}
        case "logprob":
            settings |= {"num_tokens": 4096 if quick else 32768, "vocabulary": 151936, "hidden_size": 2048}
            settings |= {"compared_tokens": 1024, "rounds": 3 if quick else 5}
    return Job(check=check, settings=settings, environment=environment, deadline_s=300.0 if quick else 900.0)


def plan(checks: list[str], machine: Machine, *, quick: bool) -> dict[str, Job | str]:
    """Check -> its job, or what it needs and does not find."""
    return {check: missing_need(check, machine) or make_job(check, machine, quick=quick) for check in checks}
