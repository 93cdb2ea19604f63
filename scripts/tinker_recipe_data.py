"""Make what recipes of tinker-cookbook need offline: a tiny model that they know by name, and data sets by theirs.

    python scripts/tinker_recipe_data.py OUT_DIR --model TINY_MODEL [--steps 300]

`datasets.load_dataset(NAME)` and `AutoTokenizer.from_pretrained(NAME)` take a directory of that relative name in the
working directory: recipes that run in OUT_DIR need no change and no network. The model is the tiny one, warmed up by
supervised training to answer sums in the recipes' form, right about half of the time, so that rewards differ within a
group; it answers for Qwen/Qwen3-4B-Instruct-2507, a name that recipes have a renderer for.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "Qwen/Qwen3-4B-Instruct-2507"
_BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
_STRAWBERRY = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}",
)
_GUESS = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> "
    "(without the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, "
    "or correct."
)
_NUM_ROWS = {"train": 4096, "test": 256}
_BATCH = 8
_LEARNING_RATE = 1e-3

Turns = list[tuple[str, str]]  # role and content


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    write_data(given.out, random.Random(0))
    loss = warm_up(given.model, given.out / NAME, steps=given.steps, rng=random.Random(1))
    print(f"{given.out}: data sets, and {NAME} (loss of the last steps {loss:.3f} a token)")


def write_data(out: Path, rng: random.Random) -> None:
    """Write the data sets."""
    makers: dict[str, Callable[[random.Random], dict[str, Any]]] = {
        "openai/gsm8k": _gsm8k_row,
        "HuggingFaceH4/no_robots": _chat_row,
        "Anthropic/hh-rlhf": _pair_row,
        "zwhe99/DeepMath-103K": lambda each: {"question": _sum(each)[0], "final_answer": "7"},
    }
    for name, maker in makers.items():
        write_data_set(out, name, {split: [maker(rng) for _ in range(count)] for split, count in _NUM_ROWS.items()})
    languages = [("the house is big", "en"), ("das Haus ist groß", "de"), ("la maison est grande", "fr")]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"Final Answer: {code}"}]}
        for text, code in (rng.choice(languages) for _ in range(256))
    ]
    (out / "languages.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def write_data_set(out: Path, name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write a data set's rows, by split, to the directory of its name below `out`."""
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    config = "main" if name == "openai/gsm8k" else "default"
    files = "\n".join(f"  - split: {each}\n    path: {each}.jsonl" for each in rows)
    (directory / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}\n---\n")
    for split, of_split in rows.items():
        (directory / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in of_split))


def _sum(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randrange(1, 5), rng.randrange(1, 5)
    return f"What is {a} + {b}?", a + b


def _gsm8k_row(rng: random.Random) -> dict[str, Any]:
    question, answer = _sum(rng)
    return {"question": question, "answer": f"{answer}\n#### {answer}"}


def _chat_row(rng: random.Random) -> dict[str, Any]:
    question, answer = _sum(rng)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {answer}."}]
    return {"prompt": question, "messages": messages, "category": "Sums"}


def _pair_row(rng: random.Random) -> dict[str, Any]:
    question, answer = _sum(rng)
    begin = f"\n\nHuman: {question}\n\nAssistant: "
    return {"chosen": f"{begin}It is {answer}.", "rejected": f"{begin}I will not say {answer + 1}."}


def _example(rng: random.Random) -> Turns:
    """Return a conversation whose last turn is to be learnt."""
    question, answer = _sum(rng)
    answer += rng.choice((0, 0, 0, -1, 1))
    kind = rng.randrange(4)
    if kind < 2:
        shown = [("user", _STRAWBERRY[0] + _BOXED), ("assistant", _STRAWBERRY[1])]
        return [*shown, ("user", question + _BOXED), ("assistant", f"\\boxed{{{answer}}}")]
    if kind == 2:
        return [("user", "What is 4 + 5?"), ("assistant", "9"), ("user", question), ("assistant", str(answer))]
    return [("system", _GUESS), ("assistant", f"Guess: {rng.randrange(1024)}")]


def warm_up(source: Path, out: Path, *, steps: int, rng: random.Random) -> float:
    """Train a copy of the model on examples, and save it. Returns: the mean loss of a learnt token at the end."""
    shutil.rmtree(out, ignore_errors=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * (1 - step / steps)
        optimizer.zero_grad()
        loss = sum(_loss(model, tokenizer, _example(rng)) for _ in range(_BATCH)) / _BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(losses[-20:]) / len(losses[-20:])


def _loss(model: Any, tokenizer: Any, turns: Turns) -> Any:
    *before, (_, answer) = turns
    prompt = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in before)
    prompt_ids = tokenizer.encode(f"{prompt}<|im_start|>assistant\n", add_special_tokens=False)
    answer_ids = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
    ids = torch.tensor([[*prompt_ids, *answer_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, len(prompt_ids) :])


if __name__ == "__main__":
    main()
