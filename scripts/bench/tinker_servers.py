"""Measure servers of Tinker's API by the same steps, interleaved: HTTP's share of a step, one server against another.

    python scripts/bench/tinker_servers.py MODEL NAME=PYTHON,URL[,PID] ... [--in-process DIR] [--json FILE]

Each server has a client of its own, a process of a PYTHON that has the `tinker` package: versions may differ. A round
is, of each in turn, one forward_backward of cross-entropy with one optim_step, and then one call that samples.
`--in-process` adds the same step by `coati.TrainingSession`, without a server. Seconds are the best round's; CPU
seconds are those of the process PID and its children, or of the session's process, in all their threads.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

STEP = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
RANK = 8


def rows_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of a step, one more a sequence than is trained."""
    rng = random.Random(0)
    return [[rng.randrange(3, 250) for _ in range(arguments.length + 1)] for _ in range(arguments.batch)]


class ServedSteps:
    """Take steps by the client."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Make a model on the server."""
        tinker: Any = import_module("tinker")
        self._types, service = tinker.types, tinker.ServiceClient(base_url=arguments.url)
        self._client = service.create_lora_training_client(base_model=arguments.name, rank=RANK, seed=0)
        self._client = self._client.result() if hasattr(self._client, "result") else self._client
        self._sampler = self._client.save_weights_and_get_sampling_client(name="bench")
        self._sampler = self._sampler.result() if hasattr(self._sampler, "result") else self._sampler
        types, of_rows = self._types, rows_of(arguments)
        self._data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * arguments.length},
            )
            for row in of_rows
        ]
        self._prompt = types.ModelInput.from_ints(of_rows[0][: arguments.prompt])
        self._samples, self._tokens = arguments.samples, arguments.max_tokens

    def step(self) -> None:
        """Take one."""
        passed = self._client.forward_backward(self._data, "cross_entropy")
        stepped = self._client.optim_step(self._types.AdamParams(**STEP))
        passed.result()
        stepped.result()

    def sample(self) -> int:
        """Sample. Returns: the number of tokens."""
        params = self._types.SamplingParams(max_tokens=self._tokens, temperature=1.0, seed=1, stop=[])
        found = self._sampler.sample(self._prompt, self._samples, params).result()
        return sum(len(each.tokens) for each in found.sequences)


class OwnSteps:
    """Take steps in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Load the model."""
        import numpy as np
        import torch

        from coati import TrainingSession
        from coati_rl.tinker.core import AdamStep, Datum, LossRequest, ModelSpec

        torch.set_num_threads(1)
        self._session = TrainingSession(arguments.url, device="cpu")
        self._session.create("bench", ModelSpec(rank=RANK, seed=0))
        weights = np.ones(arguments.length, np.float32)
        rows = [np.array(row) for row in rows_of(arguments)]
        data = [Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "weights": weights}) for row in rows]
        self._request = LossRequest(model="bench", data=data, loss="cross_entropy")
        self._step = AdamStep(**STEP)

    def step(self) -> None:
        """Take one."""
        self._session.forward_backward([self._request])
        self._session.optim_step("bench", self._step)

    def sample(self) -> int:
        """Sample nothing."""
        return 0


def work(arguments: argparse.Namespace) -> None:
    """Answer each line of standard input by a round's figures."""
    steps = OwnSteps(arguments) if arguments.name == "in-process" else ServedSteps(arguments)
    print("ready", flush=True)
    for _ in sys.stdin:
        figures = {}
        begin, cpu = time.perf_counter(), cpu_seconds(arguments.pid)
        steps.step()
        figures["step_s"], figures["step_cpu_s"] = time.perf_counter() - begin, cpu_seconds(arguments.pid) - cpu
        begin, cpu = time.perf_counter(), cpu_seconds(arguments.pid)
        figures["sampled_tokens"] = steps.sample()
        figures["sample_s"], figures["sample_cpu_s"] = time.perf_counter() - begin, cpu_seconds(arguments.pid) - cpu
        print(json.dumps(figures), flush=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children, or of this one for 0."""
    if pid == 0:
        return time.process_time()
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100 + sum(map(cpu_seconds, children))


def main() -> None:
    """Start the clients, alternate their rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as servers name it")
    parser.add_argument("servers", nargs="*", metavar="NAME=PYTHON,URL[,PID]")
    parser.add_argument("--in-process", metavar="DIR", help="of the model: take its steps without a server, too")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the sampled prompt")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "URL", "PID"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, url, pid = arguments.worker
        arguments.name = name if name == "in-process" else arguments.model
        arguments.url, arguments.pid = url, int(pid)
        work(arguments)
        return
    places = [each.partition("=") for each in arguments.servers]
    workers = {name: [*place.split(","), "0"][:3] for name, _, place in places}
    if arguments.in_process:
        workers["in-process"] = [sys.executable, arguments.in_process, "0"]
    clients = {name: start(arguments, name, *place) for name, place in workers.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for number in range(arguments.rounds + 1):
        for name, client in clients.items():
            found = ask(client)
            rounds[name] += [found] if number else []  # the first compiles, or tries shapes
    for client in clients.values():
        client.communicate(timeout=60)
    figures = {name: summary(found, arguments) for name, found in rounds.items()}
    for name, found in figures.items():
        print(f"{name:<14} " + "  ".join(f"{key} {value:.3f}" for key, value in found.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=2) + "\n", encoding="utf-8")


def start(arguments: argparse.Namespace, name: str, python: str, url: str, pid: str) -> "subprocess.Popen[str]":
    """Start a client, and wait until it is ready."""
    sizes = [
        f"--{each.replace('_', '-')}={getattr(arguments, each)}" for each in ("batch", "length", "prompt", "samples")
    ]
    sizes.append(f"--max-tokens={arguments.max_tokens}")
    command = [python, __file__, arguments.model, *sizes, "--worker", name, url, pid]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while (line := read(client)) != "ready":
        sys.stderr.write(f"{name}: {line}\n")
    return client


def ask(client: "subprocess.Popen[str]") -> dict[str, float]:
    """Have a client do a round. Returns: its figures."""
    if client.stdin is None:
        raise AssertionError("it has a pipe")
    client.stdin.write("go\n")
    client.stdin.flush()
    while not (line := read(client)).startswith("{"):
        sys.stderr.write(f"{line}\n")
    found: dict[str, float] = json.loads(line)
    return found


def read(client: "subprocess.Popen[str]") -> str:
    """Return a client's next line."""
    if client.stdout is None:
        raise AssertionError("it has a pipe")
    line = client.stdout.readline()
    if not line:
        sys.exit(f"a client ended with {client.wait()}")
    return line.strip()


def summary(rounds: list[dict[str, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the best of the rounds, each figure's own."""
    best = {key: min(each[key] for each in rounds) for key in ("step_s", "step_cpu_s", "sample_s", "sample_cpu_s")}
    tokens = rounds[0]["sampled_tokens"]
    found = {**best, "trained_tokens_per_s": arguments.batch * arguments.length / best["step_s"]}
    return found if not tokens else {**found, "sampled_tokens_per_s": tokens / best["sample_s"]}


if __name__ == "__main__":
    main()
