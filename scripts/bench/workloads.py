"""Describe what both sides of `end_to_end.py` train on, and make its models and prompts.

A workload is a directory with a Hugging Face checkpoint and `prompts.jsonl`, rows of {"messages", "gt_answer"}. The toy
ones are made by `length_model.py`. The others take a pretrained model, and arithmetic problems from a file of such
rows; problems are numbered, so that no prompt comes twice. Where every response is to have `max_new_tokens` tokens, the
token that ends one is replaced by a special token of the tokenizer that the model has no use for, on both sides.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
PROBLEMS = HERE.parents[1] / "tests" / "data" / "gsm8k_16.jsonl"
SHORTER_BY = 10  # tokens by which a filled prompt may fall short of its length
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Hold lengths and numbers of steps, of which `warm_up` and `rest` are not counted."""

    name: str
    max_new_tokens: int
    steps: int
    warm_up: int
    rest: int
    mean_length: float | None = None  # tokens of a response; None: what the model writes
    is_toy: bool = False
    prompt_tokens: int | None = None  # to which prompts are filled, chat template included; None: as they are
    max_prompt_tokens: int = 512
    reward: str = "checksum"  # of bench_rewards.py
    is_always_varied: bool = False  # no group may have equal rewards
    rollout_prompts: int  # of ours: in flight, and between two weight syncs
    our_micro_batch_tokens: int | None = None  # None: no limit
    trl_micro_batch: int | None = None  # samples, which bound TRL's memory; None: those of a step
    timeout_s: float = 900.0  # of a run

    @property
    def counted(self) -> tuple[int, int]:
        """Return the step whose end starts the measurement, and the last measured step, counted from 1."""
        return self.warm_up, self.steps - self.rest


_TOY: dict[str, Any] = {
    **{"is_toy": True, "reward": "parity", "warm_up": 4, "rest": 3, "rollout_prompts": 16, "max_prompt_tokens": 64},
}
_REAL: dict[str, Any] = {
    **{"max_new_tokens": 128, "steps": 4, "warm_up": 1, "rest": 1, "rollout_prompts": 8, "timeout_s": 7200.0},
    **{"our_micro_batch_tokens": 2048, "trl_micro_batch": 8},
}
_WORKLOADS = (
    Workload(name="uniform", max_new_tokens=64, mean_length=64, steps=60, **_TOY),
    Workload(name="geometric", max_new_tokens=448, mean_length=61, steps=30, **_TOY),
    Workload(name="gsm8k", mean_length=128, is_always_varied=True, **_REAL),
    Workload(name="long_prompts", mean_length=128, prompt_tokens=500, is_always_varied=True, **_REAL),
    Workload(name="real_rewards", reward="last_number", **_REAL),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}


def make_workload(
    workload: Workload, directory: Path, *, num_prompts: int, model: Path | None, problems: Path = PROBLEMS
) -> None:
    """Write model and prompts to a new directory.

    Args:
        workload: what is to be made.
        directory: where.
        num_prompts: rows of `prompts.jsonl`.
        model: a pretrained model with a chat template; toy workloads need none.
        problems: rows in the project's format.
    """
    if workload.is_toy:
        make = [sys.executable, str(HERE / "length_model.py"), str(directory), "--lengths", workload.name]
        make += ["--num-prompts", str(num_prompts)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return
    if model is None:
        raise SystemExit(f"{workload.name} needs --model: scripts/smollm2.py makes one")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").split("\n")[:-1]]
    prompts = [prompt_row(rows, number, tokenizer, workload.prompt_tokens) for number in range(num_prompts)]
    directory.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file.resolve())
    if workload.mean_length == workload.max_new_tokens:
        replace_end(directory, tokenizer)
    text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (directory / "prompts.jsonl").write_text(text, encoding="utf-8")


def prompt_row(rows: list[Row], number: int, tokenizer: PreTrainedTokenizerBase, num_tokens: int | None) -> Row:
    """Return the numbered problem, with parts of others ahead of it if it is to have `num_tokens` tokens.

    Raises: SystemExit if the problem alone is too long.
    """
    row = rows[number % len(rows)]
    head, question = f"Problem {number + 1}. ", str(row["messages"]["content"])
    content = head + question
    if num_tokens is not None:
        others = [rows[(number + step) % len(rows)]["messages"]["content"] for step in range(1, len(rows) + 1)]
        words = " ".join(f"{other} Think about it." for other in others).split(" ")
        words *= 1 + num_tokens // len(words)  # a word is at least a token
        taken = _most_words(words, lambda filling: _length(f"{head}{filling}\n\n{question}", tokenizer), num_tokens)
        content = f"{head}{' '.join(words[:taken])}\n\n{question}"
        if not num_tokens - SHORTER_BY <= (length := _length(content, tokenizer)) <= num_tokens:
            raise SystemExit(f"problem {number + 1} has {length} tokens and cannot be filled to {num_tokens}")
    return {"messages": {"role": "user", "content": content}, "gt_answer": row["gt_answer"]}


def _most_words(words: list[str], length_of: Callable[[str], int], num_tokens: int) -> int:
    """Return how many words, at most, make a text of at most `num_tokens` tokens."""
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length_of(" ".join(words[:middle])) <= num_tokens else (low, middle - 1)
    return low


def _length(content: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokens of a prompt with the chat template."""
    message = {"role": "user", "content": content}
    return len(tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"])


def replace_end(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name another token as the end of a response: the last special token that has no use yet.

    Raises: SystemExit if the tokenizer has none.
    """
    used = set(tokenizer.all_special_ids)
    unused = {index: token for token, index in tokenizer.get_added_vocab().items() if index not in used}
    if not unused:
        raise SystemExit(f"{directory}: the tokenizer has no special token without a use")
    end = max(unused)
    for name, values in {
        "config.json": {"eos_token_id": end, "pad_token_id": end},
        "generation_config.json": {"eos_token_id": end, "pad_token_id": end},
        "tokenizer_config.json": {"eos_token": unused[end], "pad_token": unused[end]},
    }.items():
        path = directory / name
        settings = json.loads(path.read_text(encoding="utf-8")) | values
        path.unlink()  # a link to the model's own
        path.write_text(json.dumps(settings), encoding="utf-8")


def share_of_constant_groups(samples: Iterable[Row]) -> float:
    """Return the share of groups whose rewards are equal, from the rows of a run's rollouts."""
    rewards = defaultdict[str, set[float]](set)
    for sample in samples:
        rewards[sample["uid"]].add(sample["reward"])
    return sum(len(found) == 1 for found in rewards.values()) / len(rewards)
