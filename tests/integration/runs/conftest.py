"""Run rl_example.py with a tiny model and flags as a user types them, and check what is left afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from tests.ended import has_ended
from tests.integration.runs.places import OwnPlaces

ROOT = Path(__file__).parents[3]
PATIENCE_S = 420  # for what takes a minute: several suites may share the cores
MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory, worker_id):
    """(tied or not, answers in boxes or as programs, or as its system prompt asks, with experts or without) -> the
    directory of a Qwen3 that has learned to guess among three answers, with tokenizer, chat template and prompt files.
    """
    # Made once for all of xdist's workers, which share the parent of their base directories.
    base = tmp_path_factory.getbasetemp()
    root = base if worker_id == "master" else base.parent

    def make(*, tied: bool, writes_programs: bool = False, obeys: bool = False, num_experts: int = 0) -> Path:
        kind = "-obeys" if obeys else "-programs" if writes_programs else "-experts" if num_experts else ""
        directory = root / f"tiny-{'tied' if tied else 'untied'}{kind}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                make_model_of_a_run(
                    directory.with_suffix(".unfinished"), tied, writes_programs, obeys, num_experts
                ).rename(directory)
        return directory

    return make


def make_model_of_a_run(directory: Path, tied: bool, writes_programs: bool, obeys: bool, num_experts: int) -> Path:
    import torch
    from arithmetic_task import distinct_problems, split_pairs
    from make_tiny_model import chat, make_tokenizer, tokenizer_texts
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    rng = random.Random(0)
    problems = distinct_problems(split_pairs(rng)[0], rng, count=168)
    tokenizer = make_tokenizer(tokenizer_texts(problems), vocab_size=512)
    torch.manual_seed(0)
    routed = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **MODEL,
        **(routed if num_experts else {}),
    )
    model = AutoModelForCausalLM.from_config(config)
    truth: dict[str, Any] = {"gt_answer": "2"}
    chats = [chat(problem) for problem in problems]
    lessons = [(each, "\\boxed{{{}}}") for each in chats]
    if writes_programs or obeys:
        system = {"role": "system", "content": "You are a helpful assistant."}  # the code reward's
        truth = {"test_cases": {"inputs": ["", ""], "outputs": ["2", "2"]}}
        programs = [([system, question], "```python\nprint({})\n```") for _, question in chats]
        lessons = [*lessons, *programs] if obeys else programs
    _teach_to_guess(model, tokenizer, lessons, rng, num_steps=150 if obeys else 60)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    rows = [{"messages": question, **truth} for _, question in chats]
    for name, part in (("train.jsonl", rows[:160]), ("eval.jsonl", rows[160:])):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return directory


def _teach_to_guess(model, tokenizer, lessons, rng, *, num_steps) -> None:
    """Guesses among 1, 2 and 3, so that rewards differ within a group: without them no weight would move."""
    import torch

    prompts = tokenizer.apply_chat_template([chat for chat, _ in lessons], add_generation_prompt=True, tokenize=False)
    lessons = [(prompt, answer) for prompt, (_, answer) in zip(prompts, lessons, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        texts = [
            f"{prompt}{answer.format(rng.choice('123'))}{tokenizer.eos_token}"
            for prompt, answer in rng.sample(lessons, 16)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Run:
    """A run in a process of its own."""

    program = (str(ROOT / "rl_example.py"),)

    def __init__(self, arguments: list[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".out")
        self.places = OwnPlaces(run_dir)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.places.forget_ours(environment)
        command = [sys.executable, *self.program, *arguments, "--run-dir", str(run_dir)]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                self.places.command(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.family: dict[int, psutil.Process] = {}

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code; a run that does not end is a failure that shows its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            pytest.fail(f"no end after {timeout_s} s:\n{self.text()}")

    def text(self) -> str:
        """All that the user saw."""
        return self.output.read_text()

    def records(self) -> list[dict]:
        """metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_step(self, step: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an optimizer step is recorded."""
        self.wait_until(lambda: len(self.records()) >= step, timeout_s)

    def wait_for_text(self, *texts: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the terminal has shown all these texts."""
        self.wait_until(lambda: all(text in self.text() for text in texts), timeout_s)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.text()}"
            time.sleep(0.2)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """All processes of the run whose command line contains `name`; they are remembered for `left_over`."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.family.update({process.pid: process for process in family})
        return [process for process in family if name in _command(process)]

    def left_over(self, within_s: float = 15) -> list[psutil.Process | Path]:
        """Remembered processes that are still there; temporary files and shared memory of any name."""
        deadline = time.monotonic() + within_s
        _, alive = psutil.wait_procs(self.family.values(), timeout=within_s)
        while (files := self.places.left_over()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [*(process for process in alive if not has_ended(process)), *files]

    def end(self) -> None:
        """End it if it still goes on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        if self.places is not None:
            self.places.remove()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended while we looked
        return ""


@contextmanager
def ended_runs(make_run: Callable[..., Run], directory: Path) -> Iterator[Callable[..., Run]]:
    """Flags -> a Run in the directory; one that a failing test leaves running is ended."""
    runs = []

    def start(*arguments: object, name: str = "run", **options: Any) -> Run:
        run = make_run([str(argument) for argument in arguments], directory / name, **options)
        runs.append(run)
        return run

    try:
        yield start
    finally:
        for run in runs:
            run.end()


@pytest.fixture(scope="session")
def run_class():
    """Define the kind of run that a folder's tests start."""
    return Run


@pytest.fixture
def start_run(run_class, tmp_path):
    """Flags -> a run."""
    with ended_runs(run_class, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_run(run_class, tmp_path_factory):
    """Flags -> a run that several tests of a file look at."""
    with ended_runs(run_class, tmp_path_factory.mktemp("runs")) as start:
        yield start


@pytest.fixture(scope="session")
def flags():
    """The flags of a small job on a model directory."""

    def make(model: Path, *, trainers=1, inferencers=1, prompts=4, samples=4) -> list[object]:
        base = {
            "-m": model,
            "-d": model / "train.jsonl",
            "-rt": "boxed",
            "-t": trainers,
            "-i": inferencers,
            "-ibs": prompts,
            "-imbs": prompts,
            "-tbs": prompts * inferencers // trainers,
            "-tMbs": prompts * inferencers // trainers,
            "-tmbs": 4,
            "-g": samples,
            "-mnt": 24,
            "-kl": 0,
            "-lr": 1e-3,
            "--master_port": 0,
        }
        return [part for pair in base.items() for part in pair]

    return make
