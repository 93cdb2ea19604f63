"""Read the commands of docs/coming_from that stand for other projects' printed examples, and make them small.

A command keeps its flags. In place of names of the hub stand tiny models and rows in the format that the example reads;
`--wandb` and `--master_address`, which need an account and a cluster, are left out. `sizes` replaces values of flags.
"""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import check_docs

PAGES = ("openrlhf", "rl2", "rl4llm", "trl", "verl")
FOLDER = check_docs.ROOT / "docs" / "coming_from"
STEP_TOKEN = "ки"
MODEL_FLAGS = ("-m", "--teacher", "--reference-model")
ROW_FLAGS = ("-d", "-ed")
NEVER = {"--wandb": 0, "--master_address": 1}  # with the number of their values
REWARD_FUNCTIONS = """
def reward_func(queries, prompts, labels):  # OpenRLHF
    rewards = [float(label in query[len(prompt):]) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"share": sum(rewards) / len(rewards)}}


def reward_fn(messages, answer):  # RL2
    return float(answer in messages[-1]["content"])
"""


@dataclass(frozen=True)
class Example:
    """Hold a command of a page."""

    page: str
    number: int  # on its page, from 1
    words: tuple[str, ...]  # after "coati-rl"

    @property
    def job(self) -> str:
        return self.words[0]

    @property
    def name(self) -> str:
        return f"{self.page}-{self.number}-{self.job}"


def read_examples() -> list[Example]:
    """Return the commands of all pages, in order; bash itself splits them into words."""
    examples = []
    for page in PAGES:
        texts = [block.text for block in check_docs.blocks(FOLDER / f"{page}.md") if block.language == "bash"]
        lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
        for number, line in enumerate(lines, 1):
            program, *words = _split(line)
            assert program == "coati-rl", line
            examples.append(Example(page=page, number=number, words=tuple(words)))
    return examples


def _split(line: str) -> list[str]:
    script = f"printf '%s\\0' {line}"
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    return printed.split("\0")[:-1]


def _user(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number}+1?"}]


def _turns(number: int) -> list[dict[str, str]]:
    return [*_user(number), {"role": "assistant", "content": f"It is {number + 1}."}]


def _pair_of_rl2(number: int) -> dict[str, Any]:
    return {"messages": _user(number), "chosen": f"{number + 1}", "rejected": f"{number + 2}"}


def _pair_of_trl(number: int) -> dict[str, Any]:
    right, wrong = ([*_user(number), {"role": "assistant", "content": f"{number + off}"}] for off in (1, 2))
    return {"chosen": right, "rejected": wrong, "score_chosen": 9.0, "score_rejected": 4.0}


def _task_of_rl2(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, *_user(number)], "answer": str(number % 10)}


# Name in the pages -> the row of a number, in the format of that dataset or of the project's documents.
ROWS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "Open-Orca/OpenOrca": lambda n: {"system_prompt": "", "question": f"{n}+1?", "response": f"It is {n + 1}."},
    "conversations.jsonl": lambda n: {"conversations": [*_turns(n), *_turns(n + 1)]},
    "texts.jsonl": lambda n: {"text": f"The sky has {n} clouds."},
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": lambda n: {
        "chosen": _turns(n),
        "rejected": [*_user(n), {"role": "assistant", "content": "No."}],
    },
    "Dylan2048/ultrafeedback-unpaired-preferences": lambda n: {
        "instruction": f"{n}+1?",
        "response": f"It is {n + 1}.",
        "score": n % 2,
    },
    "zhuzilin/Math-Shepherd": lambda n: {
        "input": f"{n}+2? Step 1: {n}+1 {STEP_TOKEN}\nStep 2: {n + 2} {STEP_TOKEN}\n",
        "value": ["+", "+-"[n % 2]],
    },
    "OpenRLHF/prompt-collection-v0.1": lambda n: {"context_messages": _user(n)},
    "your_prompt_dataset.jsonl": lambda n: {"prompt": f"{n}+1?", "answer": str(n % 10)},
    "Chenmien/LIMO": lambda n: {"messages": _turns(n)},
    "Chenmien/SkyworkRM": _pair_of_rl2,
    "Chenmien/UltraFeedback": _pair_of_rl2,
    "Chenmien/OpenReasonerZero": _task_of_rl2,
    "Chenmien/OlympiadBench": _task_of_rl2,
    **dict.fromkeys(["trl-lib/Capybara", "capybara-test.jsonl"], lambda n: {"messages": _turns(n)}),
    **dict.fromkeys(["trl-lib/ultrafeedback_binarized", "ultrafeedback-test.jsonl"], _pair_of_trl),
    **dict.fromkeys(
        ["gsm8k-train.jsonl", "gsm8k-test.jsonl"], lambda n: {"question": f"{n}+1?", "answer": str(n % 10)}
    ),
}


@dataclass
class Places:
    """Hold what stands in the place of names of the hub, all in one directory."""

    directory: Path
    model: Path
    experts: Path  # of mixtures
    reward_model: Path
    reward_url: str
    num_rows: int
    written: dict[str, str] = field(default_factory=dict)

    def words(self, example: Example, *, sizes: Mapping[str, object] | None = None) -> list[str]:
        """Return an example's words, job first, with other models, rows, rewards, outputs and sizes."""
        words, rest, sizes = [example.job], list(example.words[1:]), dict(sizes or {})
        left_out = NEVER | {flag: 1 for flag, value in sizes.items() if value is None}
        while rest:
            flag = rest.pop(0)
            if flag in left_out:
                del rest[: left_out[flag]]
                continue
            words.append(flag)
            if rest and not re.match("--?[A-Za-z]", rest[0]):
                words.append(self._value(flag, rest.pop(0), sizes))
        added = {flag: value for flag, value in sizes.items() if value is not None and flag not in words}
        return [*words, *(str(part) for pair in added.items() for part in pair)]

    def _value(self, flag: str, value: str, sizes: Mapping[str, object]) -> str:
        if flag in MODEL_FLAGS:
            return str(self.experts if "Mixtral" in value else self.model)
        if flag == "--critic-model":
            return str(self.reward_model)
        if flag in ROW_FLAGS:
            name, equals, path = value.rpartition("=")
            return f"{name}{equals}{self.rows(path)}"
        if flag in ("-o", "--run-dir", "--save-dir"):
            return str(self.directory / value)
        if flag == "-rt":
            kind, _, name = value.rpartition(":")
            if kind == "model":
                return f"model:{self.reward_model}"
            if not kind:
                return value
            return self.reward_url if value.startswith("http") else f"{self._function()}:{name}"
        return str(sizes.get(flag, value))

    def rows(self, name: str) -> str:
        """Return the file of a dataset's rows; the output of an earlier command is what that wrote."""
        if name not in ROWS:
            return str(self.directory / name)
        if name not in self.written:
            path = self.directory / f"rows-{len(self.written)}.jsonl"
            path.write_text("".join(json.dumps(ROWS[name](number)) + "\n" for number in range(self.num_rows)))
            self.written[name] = str(path)
        return self.written[name]

    def _function(self) -> Path:
        path = self.directory / "reward_functions.py"
        path.write_text(REWARD_FUNCTIONS)
        return path


def with_step_token(model: Path, directory: Path, **settings: Any) -> Path:
    """Return a copy of a tiny model whose tokenizer has the token after steps; `settings` change its configuration."""
    from transformers import AutoTokenizer

    shutil.copytree(model, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([STEP_TOKEN], special_tokens=True)
    tokenizer.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    if len(tokenizer) > config["vocab_size"]:
        _widen(directory, len(tokenizer))
        config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def _widen(directory: Path, vocab_size: int) -> None:
    """Give a model logits for so many tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.save_pretrained(directory)


def write_experts(policy: Path, directory: Path) -> Path:
    """Write a random mixture of experts of a policy's shape, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(policy, directory, ignore=lambda *_: {"model.safetensors"})
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "model_type": "qwen3_moe"}
    config = json.loads((directory / "config.json").read_text()) | sizes
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def write_reward_model(policy: Path, directory: Path) -> Path:
    """Write a random reward model of a policy's shape, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    torch.manual_seed(1)
    model = Qwen3ForSequenceClassification(AutoConfig.from_pretrained(policy, num_labels=1))
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy).save_pretrained(directory)
    return directory


@contextmanager
def served_rewards() -> Iterator[str]:
    """Serve OpenRLHF's protocol: the reward of a query is 1 if its length is odd. Yields: the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
            content = json.dumps({"rewards": [float(len(query) % 2) for query in queries]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """No lines in the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/get_reward"
    finally:
        server.shutdown()
        server.server_close()
