"""Compare what context-parallel ranks exchange for a layer: keys and values gathered, or heads for tokens (Ulysses).

Real collectives of gloo on one machine, float32, forward and backward, without computing attention. Out: for each
number of ranks and of key heads the bytes that a rank receives, and CPU seconds of all ranks, medians, in turns.

python scripts/bench/context_exchange.py [--tokens 8192] [--rounds 5]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

HEADS, SIZE = 32, 128  # of queries, and numbers of a head
FLOAT32 = 4  # bytes


def gathered(own_keys: Tensor, ranks: int) -> None:
    """Gather keys and values in the forward and again in the backward, and sum the gradients of both."""
    whole = own_keys.new_empty(ranks * len(own_keys), *own_keys.shape[1:])
    for _ in range(4):
        dist.all_gather_into_tensor(whole, own_keys)
    for _ in range(2):
        dist.reduce_scatter_tensor(own_keys, whole)


def exchanged(own_queries: Tensor, own_keys: Tensor) -> None:
    """Send queries, keys and values to the ranks of their heads and outputs back; in the backward their gradients."""
    for tensor in (own_queries, own_queries, own_keys, own_keys) * 2:
        dist.all_to_all_single(torch.empty_like(tensor), tensor)


def seconds_of(exchange: Callable[[], None]) -> float:
    """Return the CPU seconds of all ranks."""
    dist.barrier()
    begin = time.process_time()
    exchange()
    seconds = torch.tensor(time.process_time() - begin)
    dist.all_reduce(seconds)
    return float(seconds)


def run_rank(rank: int, ranks: int, store: str, arguments: argparse.Namespace) -> None:
    """Take all measurements of one number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    own = arguments.tokens // ranks
    for key_heads in (4, 8, 32):
        queries, keys = (torch.zeros(own, heads, SIZE) for heads in (HEADS, key_heads))
        both = (lambda keys=keys: gathered(keys, ranks), lambda q=queries, keys=keys: exchanged(q, keys))
        times = [[seconds_of(each) for each in both] for _ in range(arguments.rounds + 1)][1:]
        head = own * SIZE * FLOAT32 * (ranks - 1)  # of a head, from all other ranks; or of a head's share from each
        sizes = 6 * key_heads * head, 4 * (HEADS + key_heads) * head // ranks
        if rank == 0:
            shown = "  ".join(
                f"{name} {size / 2**20:6.0f} MiB {statistics.median(taken):6.3f} s"
                for name, size, taken in zip(("gathered", "exchanged"), sizes, zip(*times, strict=True), strict=True)
            )
            print(f"{ranks} ranks, {key_heads:2} key heads: {shown}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run two ranks, then four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a row (8192)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that is not (5)")
    arguments = parser.parse_args()
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as directory:
            store = str(Path(directory) / "store")
            torch.multiprocessing.spawn(run_rank, args=(ranks, store, arguments), nprocs=ranks)


if __name__ == "__main__":
    main()
