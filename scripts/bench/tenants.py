"""Measure several models' requests in common passes of a training session against the same ones, one after another.

    python scripts/bench/tenants.py [--model DIR] [--tenants 8] [--batch 8] [--lengths 8,16,32,64] [--json FILE]

Every tenant trains adapters of its own and sends one request of `--batch` sequences, with importance sampling. A round
computes all requests by one call, and then by one call each; rounds alternate, and the best of each is taken. Time is
the CPU time of the process on a CPU, which other programs change less than the clock, and the clock's on a GPU. Before
the first length, each tenant's log-probabilities and gradient norms must have the same bits by both ways.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import save_random_model

from coati import TrainingSession
from coati_rl.tinker.core import AdamStep, Datum, LossRequest, LossResult, ModelSpec, RequestError

STEP = AdamStep(learning_rate=1e-4)
Requests = Sequence[LossRequest]


def make_requests(arguments: argparse.Namespace, length: int, vocabulary: int) -> list[LossRequest]:
    """Draw one request of each tenant, of sequences of equal length."""
    rng = np.random.default_rng(length)

    def datum() -> Datum:
        floats = {"logprobs": rng.normal(size=length) * 0.4 - 6, "advantages": rng.normal(size=length)}
        inputs: dict[str, np.ndarray] = {name: value.astype(np.float32) for name, value in floats.items()}
        inputs["target_tokens"] = rng.integers(3, vocabulary, length)
        return Datum(tokens=rng.integers(3, vocabulary, length), inputs=inputs)

    return [
        LossRequest(
            model=f"tenant-{number}", data=[datum() for _ in range(arguments.batch)], loss="importance_sampling"
        )
        for number in range(arguments.tenants)
    ]


def together(session: TrainingSession, requests: Requests) -> list[LossResult | RequestError]:
    """Compute requests by one call."""
    return session.forward_backward(requests)


def one_by_one(session: TrainingSession, requests: Requests) -> list[LossResult | RequestError]:
    """Compute requests by one call each."""
    return [result for request in requests for result in session.forward_backward([request])]


def check_bits(session: TrainingSession, requests: Requests, rank: int) -> None:
    """Raise SystemExit unless both ways have equal bits."""
    found = []
    for compute in (together, one_by_one):
        for number, request in enumerate(requests):
            session.create(request.model, ModelSpec(rank=rank, seed=number))
        results = compute(session, requests)
        logprobs = [values.tobytes() for each in results if isinstance(each, LossResult) for values in each.logprobs]
        found.append((logprobs, [session.optim_step(request.model, STEP) for request in requests]))
        for request in requests:
            session.drop(request.model)
    if found[0] != found[1]:
        sys.exit("the bits of a tenant's results depend on the other tenants")


def clock(device: str) -> float:
    """Return seconds of the process on a CPU, of the clock on a GPU, after what it was asked for."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(session: TrainingSession, requests: Requests, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the best seconds of both ways, tokens/s and how many times as many the common passes compute."""
    best = {compute: float("inf") for compute in (together, one_by_one)}
    for number in range(arguments.rounds + 1):
        for compute in best:
            start = clock(arguments.device)
            compute(session, requests)
            if number:  # the first round tries shapes
                best[compute] = min(best[compute], clock(arguments.device) - start)
    tokens = sum(len(datum.tokens) for request in requests for datum in request.data)
    return {
        "together_s": best[together],
        "one_by_one_s": best[one_by_one],
        "tokens_per_s": tokens / best[together],
        "ratio": best[one_by_one] / best[together],
    }


def main() -> None:
    """Measure each length, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="directory; default: a random model of --layers and --hidden")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a request")
    parser.add_argument("--lengths", default="8,16,32,64", help="tokens of a sequence")
    parser.add_argument("--pass-tokens", type=int, help="of a forward and backward; default: the device's")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or random_model(Path(scratch) / "model", arguments)
        with TrainingSession(model, device=arguments.device, pass_tokens=arguments.pass_tokens) as session:
            lengths = [int(each) for each in arguments.lengths.split(",")]
            check_bits(session, make_requests(arguments, lengths[0], session.vocab_size), arguments.rank)
            for number in range(arguments.tenants):
                session.create(f"tenant-{number}", ModelSpec(rank=arguments.rank, seed=number))
            for length in lengths:
                requests = make_requests(arguments, length, session.vocab_size)
                rows[str(length)] = found = measure(session, requests, arguments)
                print(
                    f"{length:5d} tokens a sequence: together {found['together_s'] * 1e3:8.1f} ms, one by one "
                    f"{found['one_by_one_s'] * 1e3:8.1f} ms, {found['ratio']:.2f} times, "
                    f"{found['tokens_per_s']:.0f} tokens/s",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def random_model(directory: Path, arguments: argparse.Namespace) -> Path:
    """Write a random model."""
    save_random_model(
        directory, vocab=arguments.vocab, hidden=arguments.hidden, layers=arguments.layers, max_positions=2048
    )
    return directory


if __name__ == "__main__":
    main()
