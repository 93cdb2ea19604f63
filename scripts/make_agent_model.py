"""Create a tiny Qwen3 model of random weights for an agent's task, and the files to train it with.

    python scripts/make_agent_model.py OUT_DIR --task multiplication
    python scripts/make_agent_model.py OUT_DIR --task guessing --env-arg min_number=10 --env-arg max_number=40

Out: OUT_DIR holds an ordinary Hugging Face checkpoint, whose chat template knows tools (Hermes format), `train.jsonl`
and `eval.jsonl` with prompts, and `sft.jsonl` with conversations for `coati-rl sft`. With one thread and one seed the
result is deterministic on one machine.
"""

import argparse
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import guessing_task
import make_tiny_model
import multiplication_task
import torch
from tool_chat_template import CHAT_TEMPLATE
from transformers import PreTrainedTokenizerFast

from coati_rl.config.environment import EnvironmentConfig

Row = dict[str, Any]
TASKS = ("multiplication", "guessing")
_BOUNDARY = re.compile(r"<\|im_start\|>|<\|im_end\|>|(?<=<\|im_start\|>assistant\n)")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder to write the checkpoint and the data to")
    parser.add_argument("--task", choices=TASKS, required=True, help="task that the data are of")
    parser.add_argument("--env-arg", action="append", default=[], metavar="NAME=VALUE", help="argument of the game")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument("--num-layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--hidden-size", type=int, default=128, help="width; always 4 attention heads of 32")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens, 256 bytes and 3 special ones included")
    parser.add_argument("--num-train", type=int, default=8192, help="rows of train.jsonl")
    parser.add_argument("--num-eval", type=int, default=256, help="rows of eval.jsonl")
    parser.add_argument("--num-conversations", type=int, default=16384, help="rows of sft.jsonl")
    parser.set_defaults(tied=True)
    return parser.parse_args()


def make_data(arguments: argparse.Namespace) -> tuple[list[Row], list[Row], list[Row]]:
    """Return (prompts to train on, held-out prompts, conversations) of the task."""
    rng = random.Random(arguments.seed)
    counts = {name: getattr(arguments, name) for name in ("num_train", "num_eval", "num_conversations")}
    if arguments.task == "multiplication":
        return multiplication_task.make_data(rng, **counts)
    of_game = EnvironmentConfig(env=f"textarena:{guessing_task.GAME}", env_arg=arguments.env_arg).arguments
    return guessing_task.make_data(rng, of_game, **counts)


def make_tokenizer(conversations: Iterable[Row], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the texts between special tokens, and give it the chat template."""
    untrained = make_tiny_model.make_tokenizer([], vocab_size=0)
    untrained.chat_template = CHAT_TEMPLATE
    texts = (text for row in conversations for text in _texts(untrained, row))
    tokenizer = make_tiny_model.make_tokenizer(texts, vocab_size=vocab_size)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _texts(tokenizer: PreTrainedTokenizerFast, row: Row) -> Iterator[str]:
    """Yield the parts of a rendered conversation; an answer is one, so that no merge goes over its start."""
    rendered = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    yield from filter(None, _BOUNDARY.split(str(rendered)))


def main() -> None:
    """Create the data, the tokenizer and the model."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    prompts, held_out, conversations = make_data(arguments)
    tokenizer = make_tokenizer(conversations[:2000], vocab_size=arguments.vocab_size)
    arguments.vocab_size = len(tokenizer)
    model = make_tiny_model.make_model(tokenizer, arguments)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", prompts), ("eval", held_out), ("sft", conversations)):
        make_tiny_model.write_rows(arguments.out_dir / f"{name}.jsonl", rows)
    tokenizer.save_pretrained(arguments.out_dir)
    model.save_pretrained(arguments.out_dir)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    counts = f"{num_parameters:,} parameters, {len(tokenizer)} tokens, {len(conversations)} conversations"
    print(f"{arguments.out_dir}: {counts}")


if __name__ == "__main__":
    main()
