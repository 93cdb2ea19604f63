"""Measure the cost of a weight sync against copying the same bytes, and against vLLM's loading of them.

    python scripts/bench/weight_sync.py [--mib 1024] [--rounds 5] [--backends shm gloo file] [--directory DIR]
                                        [--engine-backends shm gloo] [--no-engine] [--json FILE]
    python scripts/bench/weight_sync.py --device cuda [--quick] [--backends nccl ipc] [--json FILE]

Staging: bf16 weights of realistic shapes are sent from this process to another one on the same node, where they are
staged and their digest compared; memcpy is `torch.Tensor.copy_` of the same tensors on one thread or on the GPU. Every
variant runs once per round. With one GPU NCCL uses sockets, so that its figure does not show NCCL's speed.
Engine: a random bf16 model is sent to a vLLM engine on CPU, staged beside the serving weights and committed
(vLLM's load and re-pack). Figures are medians over rounds, after two warm-up rounds that allocate memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import join_group
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.rendezvous import CollectiveBackend, Rendezvous
from coati_rl.transport.staging_memory import GpuMemory, HostMemory
from coati_rl.transport.wire import WeightSender, receive

TIMEOUT_S, NUM_WARM_UP = 300.0, 2  # memory may be used by turns of two
QUICK_MIB = 48  # one layer
Named = list[tuple[str, torch.Tensor]]


def make_state(num_mib: int, device: torch.device) -> Named:
    """Create layers of a 1.5B-parameter Qwen2 up to the size."""
    shapes = {
        "self_attn.q_proj.weight": (1536, 1536),
        "self_attn.q_proj.bias": (1536,),
        "self_attn.k_proj.weight": (256, 1536),
        "self_attn.k_proj.bias": (256,),
        "self_attn.v_proj.weight": (256, 1536),
        "self_attn.v_proj.bias": (256,),
        "self_attn.o_proj.weight": (1536, 1536),
        "mlp.gate_proj.weight": (8960, 1536),
        "mlp.up_proj.weight": (8960, 1536),
        "mlp.down_proj.weight": (1536, 8960),
        "input_layernorm.weight": (1536,),
        "post_attention_layernorm.weight": (1536,),
    }
    state: Named = []
    num_bytes, layer = 0, 0
    while num_bytes < num_mib * 2**20:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
            state.append((f"model.layers.{layer}.{name}", tensor))
            num_bytes += tensor.nbytes
        layer += 1
    return state


@contextmanager
def staging(backend: CollectiveBackend, state: Named, directory: Path) -> Iterator[Callable[[], object]]:
    """Start a process that stages updates, and yield a function that sends it one."""
    sender = WeightSender(backend=backend, device=state[0][1].device, directory=directory)
    manifest = build_manifest(state, policy_version=1)
    device = {"nccl": f"cuda:{torch.cuda.device_count() - 1}", "ipc": "cuda:0"}.get(backend, "cpu")
    (invitation,) = sender.open([1])
    receiver = start("receive", invitation.to_json(), manifest.to_json(), device)
    try:
        yield lambda: sender.send(manifest, state, timeout_s=TIMEOUT_S)  # ends when the receiver has its digest
    finally:
        sender.close()
        receiver.kill()
        receiver.wait()


def receive_for_ever(invitation: Rendezvous, manifest: WeightManifest, device: torch.device) -> None:
    """Receive updates without end, in the other process."""
    torch.set_num_threads(1)
    group = join_group(invitation, rank=invitation.first_rank, device=device, deadline=Deadline(TIMEOUT_S))
    memory = HostMemory() if device.type == "cpu" else GpuMemory(device)
    while True:
        receive(group, manifest, memory=memory, deadline=Deadline(TIMEOUT_S))


def nccl_environment(rank: int) -> dict[str, str]:
    """Return variables that allow two ranks on one GPU: NCCL before 2.30 requires that they look like two hosts."""
    if torch.cuda.device_count() != 1:
        return {}
    hosts = {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return hosts | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def measure_staging(
    backends: Sequence[CollectiveBackend], num_mib: int, num_rounds: int, directory: Path, device: torch.device
) -> dict[str, Any]:
    """Return GB/s and the ratio to memcpy, by name."""
    state = make_state(num_mib, device)
    copies = [torch.zeros_like(tensor) for _, tensor in state]

    def memcpy() -> None:
        for copy, (_, tensor) in zip(copies, state, strict=True):
            copy.copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {"memcpy": memcpy}
        for backend in backends:
            ways[backend] = stack.enter_context(staging(backend, state, directory))
        seconds = repeat(ways, num_rounds)
    gigabytes = sum(tensor.nbytes for _, tensor in state) / 1e9
    return {
        name: {
            "seconds": median(times),
            "gb_per_s": gigabytes / median(times),
            "to_memcpy": median(seconds["memcpy"]) / median(times),
        }
        for name, times in seconds.items()
    }


def make_checkpoint(directory: Path) -> Path:
    """Create a random Qwen3 of 327 MiB in bf16 that vLLM can serve on CPU."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    words = {f"w{i}": i for i in range(8191)} | {"<eos>": 8191}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def load_state(checkpoint: Path) -> Named:
    """Return copies of the checkpoint's tensors, in its order."""
    from safetensors.torch import load_file

    return [(name, tensor.clone()) for name, tensor in load_file(checkpoint / "model.safetensors").items()]


def send_for_ever(backend: CollectiveBackend, checkpoint: Path, directory: Path) -> None:
    """Run the trainer's process: print an invitation, then send an update of the version that each line requests."""
    torch.set_num_threads(1)
    sender = WeightSender(backend=backend, directory=directory)
    (invitation,) = sender.open([1])
    print(invitation.to_json(), flush=True)
    state = load_state(checkpoint)
    print("ready", flush=True)
    for line in sys.stdin:
        sender.send(build_manifest(state, policy_version=int(line)), state, timeout_s=TIMEOUT_S)


def measure_engine(backends: Sequence[CollectiveBackend], num_rounds: int, directory: Path) -> dict[str, Any]:
    """Return the seconds of staging and commit, and of the commit alone, by backend."""
    from producer.engines import engine_environment

    os.environ |= engine_environment("cpu", 1)
    from producer.engines.options import EngineOptions
    from producer.engines.vllm_engine import VllmEngine

    checkpoint = make_checkpoint(directory / "model")
    metadata = load_state(checkpoint)
    engine = VllmEngine(EngineOptions(model=str(checkpoint), dtype="bfloat16", max_model_len=256, max_num_seqs=4))
    seconds: dict[str, list[tuple[float, float]]] = {backend: [] for backend in backends}
    version = 0
    try:
        engine.wait_ready(TIMEOUT_S)
        for backend in backends:  # one after the other: an engine is in one group at a time
            trainer = start("send", backend, str(checkpoint), str(directory / "weights"))
            try:
                invitation = Rendezvous.from_json(read_line(trainer))
                read_line(trainer)
                for _ in range(NUM_WARM_UP + num_rounds):
                    version += 1
                    manifest = build_manifest(metadata, policy_version=version)
                    before = time.perf_counter()
                    print(version, file=trainer.stdin, flush=True)
                    engine.stage_weights(manifest, invitation, timeout_s=TIMEOUT_S)
                    staged = time.perf_counter()
                    engine.commit_weights(version, in_flight=False, timeout_s=TIMEOUT_S)
                    done = time.perf_counter()
                    seconds[backend].append((done - before, done - staged))
            finally:
                trainer.kill()
                trainer.wait()
    finally:
        engine.close()
    counted = {backend: rounds[NUM_WARM_UP:] for backend, rounds in seconds.items()}
    return {
        backend: {
            "seconds": median(total for total, _ in rounds),
            "commit_s": median(commit for _, commit in rounds),
            "to_commit": median(total / commit for total, commit in rounds),
            "mib": sum(tensor.nbytes for _, tensor in metadata) / 2**20,
        }
        for backend, rounds in counted.items()
    }


def repeat(ways: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Run every variant once per round. Returns: the seconds of each variant."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_WARM_UP + num_rounds):
        for name, run in ways.items():
            before = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - before)
    return {name: times[NUM_WARM_UP:] for name, times in seconds.items()}


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Start this script in another process."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_line(process: "subprocess.Popen[str]") -> str:
    """Read the next line of the other process."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise SystemExit("the sending process died")
    return line


def measure_all() -> None:
    """Measure, print the results and write them."""
    backends = get_args(CollectiveBackend)
    parser = argparse.ArgumentParser(description="Weight sync against memcpy, and against vLLM's own loading.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MIB} MiB in two rounds, no vLLM: does it run?")
    parser.add_argument("--backends", nargs="*", choices=backends, help="default: all of the device")
    parser.add_argument("--engine-backends", nargs="*", choices=backends, default=["shm", "gloo"])
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out")
    parser.add_argument("--directory", type=Path, help="for the files; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mib, arguments.rounds = QUICK_MIB, 2
    if arguments.backends is None:
        arguments.backends = ["nccl", "ipc"] if arguments.device == "cuda" else ["shm", "gloo", "file"]
    os.environ |= nccl_environment(0)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    written: dict[str, Any] = {"mib": arguments.mib, "rounds": arguments.rounds, "load": load_before}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        if arguments.backends:
            device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
            written["staging"] = measure_staging(
                arguments.backends, arguments.mib, arguments.rounds, directory / "weights", device
            )
            print(f"{arguments.mib} MiB staged in another process{'seconds':>18}{'GB/s':>10}{'to memcpy':>12}")
            for way, figures in written["staging"].items():
                print(f"{way:<40}{figures['seconds']:12.3f}{figures['gb_per_s']:10.2f}{figures['to_memcpy']:12.2f}")
        if not (arguments.no_engine or arguments.quick or arguments.device == "cuda"):
            written["engine"] = measure_engine(arguments.engine_backends, arguments.rounds, directory)
            print(f"{'into vLLM':<40}{'seconds':>12}{'commit':>10}{'to commit':>12}")
            for way, figures in written["engine"].items():
                print(f"{way:<40}{figures['seconds']:12.3f}{figures['commit_s']:10.3f}{figures['to_commit']:12.2f}")
    print(f"{os.cpu_count()} cores, load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the measurement, or one of its processes."""
    match sys.argv[1:]:
        case ["receive", invitation, manifest, device]:
            os.environ |= nccl_environment(1)
            parsed = Rendezvous.from_json(invitation), WeightManifest.from_json(manifest)
            receive_for_ever(*parsed, torch.device(device))
        case ["send", ("shm" | "gloo" | "file") as backend, checkpoint, directory]:
            send_for_ever(backend, Path(checkpoint), Path(directory))
        case _:
            measure_all()


if __name__ == "__main__":
    main()
