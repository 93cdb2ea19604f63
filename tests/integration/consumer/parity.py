"""Define a task that a tiny model learns in seconds: whether a number is odd or even, with held-out numbers."""

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?\n"
Conversation = list[dict[str, Any]]


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """One token a character, with the chat template of the tiny models."""
    vocabulary = {token: index for index, token in enumerate([EOS, IM_START, IM_END, *CHARACTERS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=IM_END,
        pad_token=EOS,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def conversations() -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out)."""
    numbers = list(range(100, 1000))
    random.Random(0).shuffle(numbers)
    rows = [
        [
            {"role": "user", "content": f"is {number} odd or even?"},
            {"role": "assistant", "content": "even" if number % 2 == 0 else "odd"},
        ]
        for number in numbers
    ]
    return rows[:640], rows[640:768]


def accuracy(model_dir: Path, tokenizer: PreTrainedTokenizerFast, rows: list[Conversation]) -> float:
    """Share of greedy answers that are right, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    right = 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(
            **prompt, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
        )
        text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text.replace(" ", "") == row[-1]["content"]
    return right / len(rows)
