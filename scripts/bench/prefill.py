"""Measure how many prompt tokens vLLM computes for a group of samples, and how fast, by the block size of its cache.

    python scripts/bench/prefill.py [--block-sizes 32 128] [--lengths 50 100 200 500 1000] [--samples 8]
        [--prompts 8] [--new-tokens 64] [--hidden 512] [--layers 8] [--rounds 3] [--json FILE]

In: a random model; prompts that share nothing, each with a group of samples, as one request. Out, by prompt length and
block size: tokens of a prompt that were computed for its group (a prompt computed once has its length, one computed for
each sample that times the samples), by the scheduler's own count; seconds until the first token of all groups; and
seconds for a token of each sample after it. Medians over rounds, in each of which a process per block size is started,
in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import save_random_model

from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines import EngineOptions, create_engine, engine_environment

VOCAB = 8192
Figures = dict[str, dict[str, float]]  # by prompt length


def save_model(directory: Path, options: argparse.Namespace) -> None:
    """Save the model; token ids are its only language, the tokenizer is one that vLLM can load."""
    from length_model import make_tokenizer

    positions = max(options.lengths) + options.new_tokens
    save_random_model(
        directory, vocab=VOCAB, hidden=options.hidden, layers=options.layers, max_positions=positions, tied=True
    )
    make_tokenizer().save_pretrained(directory)


def measure(directory: str, block_size: int, options: argparse.Namespace, seed: int) -> Figures:
    """Return the figures of one block size; a process holds one engine."""
    torch.set_num_threads(1)
    engine_options = EngineOptions(
        model=directory,
        max_model_len=max(options.lengths) + options.new_tokens,
        max_num_seqs=options.prompts * options.samples,
        block_size=block_size,
    )
    engine: Any = create_engine("vllm", engine_options)
    random = torch.Generator().manual_seed(seed)
    scheduler = engine._core._engine.engine_core.engine_core.scheduler
    schedule, scheduled = scheduler.schedule, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        scheduled[0] += step.total_num_scheduled_tokens
        return step

    scheduler.schedule = counted

    def generate(length: int, new_tokens: int) -> tuple[float, int]:
        """Return the seconds that all groups take, and the tokens that were computed."""
        prompts = [torch.randint(VOCAB, (length,), generator=random).tolist() for _ in range(options.prompts)]
        scheduled[0], begin = 0, time.perf_counter()
        futures = [
            engine.submit(
                GenerationRequest(
                    request_id=f"{length}/{new_tokens}/{number}",
                    token_ids=tuple(prompt),
                    num_samples=options.samples,
                    sampling=SamplingParams(max_new_tokens=new_tokens, seed=number),
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        tokens = [len(sample.token_ids) for future in futures for sample in future.result().completions]
        return time.perf_counter() - begin, scheduled[0] - (sum(tokens) - len(tokens))

    figures: Figures = {}
    generate(options.lengths[0], 2)  # warms up
    for length in options.lengths:
        first_s, computed = generate(length, 1)
        all_s, _ = generate(length, options.new_tokens)
        figures[str(length)] = {
            "computed_per_prompt": computed / options.prompts,
            "first_token_s": first_s,
            "further_token_s": (all_s - first_s) / max(1, options.new_tokens - 1),
        }
    engine.close()
    return figures


def measure_apart(directory: str, block_size: int, arguments: list[str], seed: int) -> Figures:
    """Return what `measure` does in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--child", directory, str(block_size), str(seed)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 100, 200, 500, 1000])
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="in flight")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(engine_environment("cpu", 1))
    if options.child:
        directory, size, seed = options.child
        print(json.dumps(measure(directory, int(size), options, int(seed))))
        return
    found: dict[int, list[Figures]] = {size: [] for size in options.block_sizes}
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), options)
        for number in range(options.rounds):
            for size in options.block_sizes:
                found[size].append(measure_apart(directory, size, sys.argv[1:], number))
    rows = [
        {
            "prompt": length,
            "block_size": size,
            **{
                name: statistics.median(each[str(length)][name] for each in found[size])
                for name in found[size][0][str(length)]
            },
        }
        for length in options.lengths
        for size in options.block_sizes
    ]
    print(f"{'prompt':>8}{'block':>8}{'computed':>10}{'of':>7}{'first token, s':>16}{'further token, ms':>19}")
    for row in rows:
        print(
            f"{row['prompt']:>8}{row['block_size']:>8}{row['computed_per_prompt']:>10.1f}"
            f"{row['prompt'] * options.samples:>7}{row['first_token_s']:>16.3f}{1000 * row['further_token_s']:>19.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
