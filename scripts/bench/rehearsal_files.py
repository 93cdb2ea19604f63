"""Write the files of the rehearsals that `rehearsal_cases.py` lists: rows, rewards, environments, damaged models."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

REWARDS = """
def right(response: str, ground_truth: str) -> float:
    return float(ground_truth in response)
def raises_on_some(response: str, ground_truth: str) -> float:
    return 1.0 / (int(ground_truth) - 900)
def hangs_on_some(response: str, ground_truth: str) -> float:
    while int(ground_truth) == 33:
        pass
    return 0.0
def returns_text(response: str, ground_truth: str):
    return "good"
def returns_nan(response: str, ground_truth: str) -> float:
    return float("nan")
def needs_column(prompts, completions, difficulty, **kwargs):
    return [float(each == "hard") for each in difficulty]
def exits(response: str, ground_truth: str) -> float:
    import os
    os._exit(1)
"""
ENVIRONMENTS = '''
class Base:
    def reset(self, task):
        self.truth = task.ground_truth
    def step(self, action):
        return [{"role": "user", "content": "Again."}], float(self.truth in action.text), action.turn > 0, {}
class Resets(Base):
    def reset(self, task):
        raise ConnectionError("no game server at port 4711")
class Steps(Base):
    def step(self, action):
        return action.text.index("MOVE:")
class Shape(Base):
    def step(self, action):
        return "only an observation"
def tool(text: str) -> str:
    """Return the text.

    Args:
        text: any.
    """
    return text
'''
LOSSES = """
def nan_loss(batch):
    return batch.logprobs.sum() * float("nan")
def one_advantage(rewards):
    return rewards[:1]
def centred(rewards):
    return rewards - rewards.mean()
"""
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    '{%- for call in message.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AGENT = "import json, sys\nimport a_module_that_is_missing\n"
Row = dict[str, Any]


def question(number: int, **more: Any) -> Row:
    """Return a row of arithmetic."""
    left, right = number % 90 + 10, number * 7 % 90 + 1
    return {"messages": {"role": "user", "content": f"Tom counts {left} apples, then {right} others. How many in all?"},
            "gt_answer": str(left + right), **more}  # fmt: skip


def write_rows(path: Path, rows: Iterable[Row | str]) -> None:
    """Write JSON lines; a text is written as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_files(root: Path, model: Path) -> None:
    """Write all files below `root`; `model` is of scripts/make_tiny_model.py."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in (("rewards.py", REWARDS), ("games.py", ENVIRONMENTS), ("losses.py", LOSSES), ("agent.py", AGENT)):
        (root / name).write_text(text, encoding="utf-8")
    (root / "refuses.jinja").write_text(REFUSES_SYSTEM, encoding="utf-8")
    (root / "broken.jinja").write_text("{% for message in messages %}", encoding="utf-8")
    (root / "tools.jinja").write_text(TOOLS, encoding="utf-8")
    _write_data(root)
    _write_models(root, model)


def _write_data(root: Path) -> None:
    rows = [question(number) for number in range(1500)]
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    pair = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    sets: dict[str, Iterable[Row | str]] = {
        "train": rows,
        "other": [question(number, difficulty="hard") for number in range(300, 700)],
        "held_out": rows[:40],
        "label_key": [{"messages": row["messages"], "solution_text": row["gt_answer"]} for row in rows],
        "no_prompt": [{"instruction_text": "1 + 1?", "gt_answer": "2"}] * 8,
        "row_900": [*rows[:900], {**rows[900], "gt_answer": "900"}, *rows[901:]],
        "surrogate": [*rows[:300], '{"messages": {"role": "user", "content": "\\ud83d"}, "gt_answer": "1"}'],
        "unicode": [
            {**row, "messages": {"role": "user", "content": f"\u4e2d\u6587 \U0001f600 {n}\u202e"}}
            for n, row in enumerate(rows)
        ],
        "assistant": [{"messages": [*said], "gt_answer": "2"}] * 8,
        "torn": [*rows[:500], '{"messages": {"role": "user", "cont'],
        "long": [{"messages": {"role": "user", "content": "apples and pens " * 400}, "gt_answer": "1"}] * 8,
        "tests": [{"messages": {"role": "user", "content": "Add."}, "test_cases": "assert add(1, 1) == 2"}] * 8,
        "code": [{"messages": {"role": "user", "content": "Add."}, "test_cases": [{"input": "1 1", "output": "2"}]}]
        * 64,
        "empty": [],
        "sft": [{"messages": said}] * 64,
        "sft_no_answer": [{"messages": said[:1]}] * 8,
        "pairs": [{**pair, "chosen": str(n)} for n in range(64, 128)],
        "equal_pairs": [{**pair, "rejected": "2"}] * 8,
        "kto": [{"prompt": f"{n} + 1?", "completion": str(n), "label": n % 2 == 0} for n in range(64)],
        "prm": [
            {"prompt": "1 + 1?", "completions": ["One more.", "2."], "labels": [True, n % 2 == 0]} for n in range(64)
        ],
        "solutions": [{"text": "Two and two are four. " * 4}] * 64,
        "twice": [rows[0]] * 64,
    }
    for name, found in sets.items():
        write_rows(root / f"{name}.jsonl", found)


def _write_models(root: Path, model: Path) -> None:
    """Write copies of the model, each with one fault, and a large one without weights."""

    def copy(name: str, change: Callable[[Path], object]) -> None:
        shutil.rmtree(root / name, ignore_errors=True)
        shutil.copytree(model, root / name, ignore=shutil.ignore_patterns("*.jsonl"))
        change(root / name)

    def config(**values: Any) -> Callable[[Path], object]:
        return lambda path: _update(path / "config.json", **values)

    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
        return lambda path: _rewrite(path / "model.safetensors", change)

    copy("torn-model", lambda path: _cut(path / "model.safetensors"))
    copy("lacks-tensor", weights(lambda found: found.pop("model.layers.1.mlp.down_proj.weight")))
    copy("unknown", config(model_type="qwen9"))
    copy("no-template", lambda path: (path / "chat_template.jinja").unlink())
    copy("gptq", config(quantization_config={"quant_method": "gptq", "bits": 4}))
    copy("generation", lambda path: (path / "generation_config.json").write_text('{"do_sample": true,'))
    copy("lacks-shard", lambda path: _index(path))
    copy("small-vocabulary", lambda path: _small_vocabulary(path))
    copy("other-tokens", lambda path: _replace(path / "tokenizer.json"))
    copy("large", lambda path: _large(path))
    shutil.rmtree(root / "adapter", ignore_errors=True)
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}', encoding="utf-8")


def _update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = load_file(path)
    change(found)
    save_file(found, path, metadata={"format": "pt"})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100_000])


def _index(path: Path) -> None:
    names = load_file(path / "model.safetensors")
    map_of = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    map_of[next(iter(names))] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": map_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _small_vocabulary(path: Path) -> None:
    _update(path / "config.json", vocab_size=400)
    key = "model.embed_tokens.weight"
    _rewrite(path / "model.safetensors", lambda found: found.update({key: found[key][:400].clone()}))


def _replace(path: Path) -> None:
    """Swap two tokens of a tokenizer."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    vocab = settings["model"]["vocab"]
    first, second = list(vocab)[20:22]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(settings), encoding="utf-8")


def _large(path: Path) -> None:
    """Write the sizes of a model of 7 billion parameters, without weights."""
    (path / "model.safetensors").unlink()
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    more = {"head_dim": 128, "num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False}
    _update(path / "config.json", **sizes, **more, layer_types=["full_attention"] * 28)
