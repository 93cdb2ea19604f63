"""Measure several tenants of a server of Tinker's API at once against the same ones, one after another.

    python scripts/bench/served_tenants.py MODEL_DIR [--tenants 8] [--batch 8] [--lengths 8,16,32,64] [--rounds 3]

The server is `coati-rl tinker-serve`, the client is the `tinker` package's. A tenant's step is one forward_backward of
importance sampling and one optim_step. One after another each tenant waits for its step's answers before the next
begins; at once all send theirs, and then wait. Rounds alternate; medians are printed: milliseconds by the clock, and
CPU milliseconds of the server (its processes) and of the client's process.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tinker_servers import cpu_seconds

ADAM = types.AdamParams(learning_rate=1e-4)


def one_after_another(starts: Sequence[Callable[[], list[Any]]]) -> None:
    """Wait for each tenant's answers before the next one begins."""
    for start in starts:
        for future in start():
            future.result()


def at_once(starts: Sequence[Callable[[], list[Any]]]) -> None:
    """Have all tenants send, and then wait."""
    for future in [future for start in starts for future in start()]:
        future.result()


def make_datum(rng: random.Random, length: int) -> types.Datum:
    """Draw a sequence."""
    ids = [rng.randrange(3, 250) for _ in range(length + 1)]
    inputs: Any = {
        "target_tokens": ids[1:],
        "logprobs": [rng.gauss(-6, 0.4) for _ in range(length)],
        "advantages": [rng.gauss(0, 1) for _ in range(length)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def training(client: Any, data: Sequence[types.Datum]) -> Callable[[], list[Any]]:
    """Return how a tenant's step is sent."""
    return lambda: [client.forward_backward(data, "importance_sampling"), client.optim_step(ADAM)]


def sampling(sampler: Any, length: int, number: int) -> Callable[[], list[Any]]:
    """Return how a tenant asks for samples."""
    prompt = types.ModelInput.from_ints([3 + (number + each) % 200 for each in range(length)])
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=number, stop=[])
    return lambda: [sampler.sample(prompt, 8, params)]


def measure(starts: Sequence[Callable[[], list[Any]]], rounds: int, server: int) -> dict[str, tuple[float, ...]]:
    """Return each way's medians: milliseconds by the clock, CPU milliseconds of the server, of the client."""
    found: dict[str, list[tuple[float, ...]]] = {"one_after_another": [], "at_once": []}
    for number in range(rounds + 1):
        for way in (one_after_another, at_once):
            begin = time.perf_counter(), cpu_seconds(server), time.process_time()
            way(starts)
            end = time.perf_counter(), cpu_seconds(server), time.process_time()
            if number:  # the first round tries shapes
                found[way.__name__].append(tuple((b - a) * 1e3 for a, b in zip(begin, end, strict=True)))
    return {way: tuple(map(statistics.median, zip(*of_way, strict=True))) for way, of_way in found.items()}


def main() -> None:
    """Start a server, measure each length, and print a line of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a request")
    parser.add_argument("--lengths", default="8,16,32,64", help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampler", help="flag of the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable,
            "-m",
            "coati_rl.command_line",
            "tinker-serve",
            "--model",
            f"base={given.model}",
            "--root",
            root,
        ]
        command += ["--port", "0", *(["--sampler", given.sampler] if given.sampler else [])]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            url = next(line.split(" on ")[1].split(",")[0] for line in server.stderr or () if "serving base on" in line)
            os.environ |= {"TINKER_API_KEY": "tml-bench", "TINKER_TELEMETRY": "0"}
            service = tinker.ServiceClient(base_url=url)
            make = service.create_lora_training_client
            clients = [make(base_model="base", rank=given.rank, seed=each).result() for each in range(given.tenants)]
            samplers = [each.save_weights_and_get_sampling_client(name="bench").result() for each in clients]
            for length in map(int, given.lengths.split(",")):
                rng = random.Random(length)
                starts = [training(each, [make_datum(rng, length) for _ in range(given.batch)]) for each in clients]
                report(f"{length} tokens, steps", measure(starts, given.rounds, server.pid))
            starts = [sampling(each, 64, number) for number, each in enumerate(samplers)]
            report("8 samples of 16 tokens, prompt of 64", measure(starts, given.rounds, server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def report(what: str, found: dict[str, tuple[float, ...]]) -> None:
    """Print a line."""
    texts = [
        f"{way}: {clock:.0f} ms, CPU {of_server:.0f} + {of_client:.0f} ms"
        for way, (clock, of_server, of_client) in found.items()
    ]
    clock, cpu = (found["one_after_another"][each] / max(found["at_once"][each], 1e-9) for each in (0, 1))
    print(f"{what}: {'; '.join(texts)}; {clock:.2f} times by the clock, {cpu:.2f} by the server's CPU", flush=True)


if __name__ == "__main__":
    main()
