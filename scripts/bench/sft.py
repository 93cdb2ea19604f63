"""Measure supervised fine-tuning with packing in tokens/s: the trainers' backend against TRL's SFTTrainer.

    python scripts/bench/sft.py [--model DIR] [--lora-rank R] [--rounds 5] [--json FILE]

Both train all samples of one dataset once a round, in turns, in one process with one thread: float32, AdamW, whole
optimizer steps of about `--step-tokens` tokens, and rows of at most `--row-tokens`, in which samples do not attend to
each other (TRL: packing with its strategy bfd). Both count the samples' tokens, without padding. Ours packs in the
timed part, TRL before it. The first round is not timed. The losses of the first round must agree.

TRL computes logits of all tokens. Ours computes those that the loss counts, so that the share of tokens in the loss
matters: `--loss-share`.
"""

import argparse
import json
import logging
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from random_model import save_random_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from coati_rl.batching.dataset_source import DatasetSettings, DatasetSource
from coati_rl.batching.packing import build_mini_batch
from coati_rl.model_files.adapter_files import ALL_LINEAR, AdapterSpec
from coati_rl.samples import Sample
from coati_rl.work import TrainWork
from consumer.adapters.adapters import AdapterSource
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, trained
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-5, 0.01, 1.0
MU, SIGMA, SHORTEST = 4.6, 0.8, 8  # tokens of a sample: lognormal, median 100
TOLERANCE = 2e-2  # of the mean loss in the first round: the two draw their samples in other orders
FLAGS = {
    "samples": (160, "samples of the dataset"),
    "row_tokens": (1024, "tokens of a packed row at most"),
    "step_tokens": (4096, "tokens of an optimizer step, about"),
    "rounds": (5, "timed passes over the dataset of each side"),
    "lora_rank": (0, "rank of adapters on all linear layers, which are trained in place of the weights (TRL: PEFT)"),
    "hidden": (256, "hidden size of the random model, where --model is not given"),
    "layers": (4, "its decoder layers"),
    "vocab": (8192, "its vocabulary"),
}


def make_samples(arguments: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Draw random tokens; the last ones of each sample, by the share, are in the loss."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(MU, SIGMA, arguments.samples).round().clip(SHORTEST, arguments.row_tokens).astype(int)
    samples = []
    for number, length in enumerate(lengths):
        token_ids = rng.integers(0, vocabulary, length).astype(np.int32)
        start = max(1, round((1 - arguments.loss_share) * length))
        mask = np.arange(length) >= start
        samples.append(
            Sample(
                uid=f"row-{number}",
                number=0,
                prefix_ids=np.empty(0, dtype=np.int32),
                token_ids=token_ids,
                loss_mask=mask,
                arrays={"loss_weights": 1.0, "temperature": 1.0},
            )
        )
    return samples


class Ours:
    """Train with the trainers' backend."""

    def __init__(self, directory: Path, samples: list[Sample], arguments: argparse.Namespace) -> None:
        spec = AdapterSpec(rank=arguments.lora_rank, alpha=2.0 * arguments.lora_rank, targets=(ALL_LINEAR,))
        adapters = AdapterSource(spec=spec, base=str(directory)) if arguments.lora_rank else None
        config = BackendConfig(models={"policy": trained(directory, adapters=adapters)})
        self._backend = Backend(config, SingleProcess(device=torch.device("cpu")))
        self._step = TrainStep(self._backend, CrossEntropy(), learning_rate=LearningRate(peak=LEARNING_RATE))
        mean_length = sum(len(sample) for sample in samples) / len(samples)
        self._settings = DatasetSettings(
            dp=1,
            trainers_per_dp_rank=1,
            batch_size=max(1, min(len(samples), round(arguments.step_tokens / mean_length))),
            micro_batch_size=len(samples),
            max_tokens_per_microbatch=arguments.row_tokens,
        )
        self._samples = samples

    def run(self) -> dict[str, float]:
        """Train once over the dataset. Returns: tokens, mean loss per step, wall_s, cpu_s."""
        source, index, tokens, losses = DatasetSource(self._samples, self._settings), 0, 0, list[float]()
        begin, cpu = time.perf_counter(), time.process_time()
        while isinstance(work := source.next_work(index, rank=0, timeout_s=0), TrainWork) or index < 1:
            assert isinstance(work, TrainWork)  # noqa: S101, there is at least one step
            batch = build_mini_batch(work.batch)
            tokens += sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
            metrics = self._step.run(batch)
            losses.append((metrics or {})["loss"])
            index += 1
        seconds = {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
        return {"tokens": tokens, "loss": statistics.fmean(losses), "steps": index, **seconds}


class Theirs:
    """Train with TRL's SFTTrainer and packing."""

    def __init__(self, directory: Path, samples: list[Sample], arguments: argparse.Namespace, scratch: Path) -> None:
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(
            output_dir=str(scratch),
            packing=True,
            packing_strategy="bfd",
            max_length=arguments.row_tokens,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=max(1, round(arguments.step_tokens / arguments.row_tokens)),
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="cosine",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        rows = {
            "input_ids": [sample.token_ids.tolist() for sample in samples],
            "labels": [np.where(s.loss_mask, s.token_ids, -100).tolist() for s in samples],
        }
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(_with_tokenizer(directory, scratch))
        adapters = None
        if rank := arguments.lora_rank:
            from peft import LoraConfig

            adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")
        self._trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            peft_config=adapters,
        )
        self._trainer.remove_callback(PrinterCallback)
        self._tokens = sum(len(row) for row in self._trainer.train_dataset["input_ids"])

    def run(self) -> dict[str, float]:
        """Train once over the dataset. Returns: see `Ours.run`."""
        begin, cpu = time.perf_counter(), time.process_time()
        done = self._trainer.train()
        seconds = {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
        return {"tokens": self._tokens, "loss": done.training_loss, "steps": done.global_step, **seconds}


def _with_tokenizer(directory: Path, scratch: Path) -> Path:
    """Return a directory with a tokenizer: SFTTrainer asks for one, also where all rows are token ids."""
    if (directory / "tokenizer.json").is_file():
        return directory
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    fast.save_pretrained(scratch / "tokenizer")
    return scratch / "tokenizer"


def measure(directory: Path, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Let both train in turns; the first round allocates memory and is not timed."""
    vocabulary = int(AutoModelForCausalLM.from_pretrained(directory).config.vocab_size)
    samples = make_samples(arguments, vocabulary)
    sides: dict[str, Ours | Theirs] = {
        "ours": Ours(directory, samples, arguments),
        "trl": Theirs(directory, samples, arguments, scratch),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for index in range(arguments.rounds + 1):
        for name in [*sides][:: 1 if index % 2 else -1]:
            figures[name].append(sides[name].run())
    first = {name: rounds[0]["loss"] for name, rounds in figures.items()}
    if not math.isclose(first["ours"], first["trl"], rel_tol=TOLERANCE):
        raise SystemExit(f"the losses of the first round differ: {first}")
    return {
        name: {
            "tokens": rounds[0]["tokens"],
            "steps": rounds[0]["steps"],
            "first_loss": first[name],
            "tokens_per_s": statistics.median(each["tokens"] / each["wall_s"] for each in rounds[1:]),
            "tokens_per_cpu_s": statistics.median(each["tokens"] / each["cpu_s"] for each in rounds[1:]),
        }
        for name, rounds in figures.items()
    }


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model in Hugging Face format; default: a random Qwen3")
    parser.add_argument("--loss-share", type=float, default=1.0, help="share of a sample's tokens in the loss [1]")
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} [{default}]")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = arguments.model or Path(name) / "model"
        if arguments.model is None:
            save_random_model(
                directory,
                vocab=arguments.vocab,
                hidden=arguments.hidden,
                layers=arguments.layers,
                max_positions=4 * arguments.row_tokens,
            )
        figures = measure(directory, arguments, Path(name))
    ratios = {key: figures["ours"][key] / figures["trl"][key] for key in ("tokens_per_s", "tokens_per_cpu_s")}
    print(f"{'':<8}{'tokens':>8}{'steps':>7}{'tokens/s':>11}{'tokens/CPU s':>14}{'loss':>9}")
    for side, numbers in figures.items():
        print(
            f"{side:<8}{numbers['tokens']:>8.0f}{numbers['steps']:>7.0f}{numbers['tokens_per_s']:>11.1f}"
            f"{numbers['tokens_per_cpu_s']:>14.1f}{numbers['first_loss']:>9.4f}"
        )
    print(f"ours / trl: {ratios['tokens_per_s']:.2f} by the clock, {ratios['tokens_per_cpu_s']:.2f} by CPU time")
    if arguments.json:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
        record = {"torch": torch.__version__, "settings": settings, **figures, "ours_over_trl": ratios}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
