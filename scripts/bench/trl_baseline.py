"""Run TRL's GRPOTrainer on one of our prompt files and record how long its steps take; in TRL's own environment.

    TRL_PYTHON scripts/bench/trl_baseline.py MODEL_DIR --max-new-tokens 64 --steps 40 --json FILE [--threads 2]
        [--prompts-per-step 8] [--group-size 8] [--micro-batch 64] [--reward parity] [--continuous-batching]
        [--warm-up 4] [--stop-every 53]

In: a checkpoint with `prompts.jsonl` beside it, rows of {"messages", "gt_answer"}. Out: JSON, `step_s` and
`cpu_s`, wall-clock and CPU seconds of each step, `mean_length`, tokens of a response with its end, and
`constant_groups`, the share of groups whose rewards are equal. With --stop-every the process stops itself (SIGSTOP)
after the warm-up and after every so many steps, with the file written; it is continued with SIGCONT.

The settings are the fastest on a CPU: a step is generated at once, and one micro-batch unless `--micro-batch` bounds
its memory; float32, no gradient checkpointing, no reference model, no second log-probability pass (one iteration a
batch), nothing saved or reported.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_rewards
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LEARNING_RATE = 1e-9  # trains without changing the model, so that lengths stay constant


class Clock(TrainerCallback):
    """Record the wall-clock and CPU seconds of each step; call `pause` between the steps, which does not count."""

    def __init__(self, pause: Callable[[int], None]) -> None:
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self._pause = pause

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self._start_s, self._start_cpu_s = time.monotonic(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self.step_s.append(time.monotonic() - self._start_s)
        self.cpu_s.append(time.process_time() - self._start_cpu_s)
        self._pause(len(self.step_s))
        self._start_s, self._start_cpu_s = time.monotonic(), time.process_time()


class Reward:
    """Provide one of `bench_rewards` in TRL's form; count tokens, and groups with equal rewards."""

    __name__ = "reward"

    def __init__(self, name: str, group_size: int) -> None:
        self._function, self._group_size = getattr(bench_rewards, name), group_size
        self.num_completions = self.num_tokens = self.num_constant = 0

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], gt_answer: list[str], **_: object
    ) -> list[float]:
        """Return the rewards of a step's completions, group by group; called by the trainer."""
        self.num_completions += len(completions)
        self.num_tokens += sum(len(token_ids) for token_ids in completion_ids)
        pairs = zip(completions, gt_answer, strict=True)
        rewards = [self._function(messages[-1]["content"], answer) for messages, answer in pairs]
        groups = [rewards[start : start + self._group_size] for start in range(0, len(rewards), self._group_size)]
        self.num_constant += sum(len(set(group)) == 1 for group in groups)
        return rewards

    @property
    def mean_length(self) -> float:
        """Return the mean length of a completion, in tokens."""
        return self.num_tokens / self.num_completions

    @property
    def constant_groups(self) -> float:
        """Return the share of groups whose rewards are equal."""
        return self.num_constant * self._group_size / self.num_completions


def read_prompts(path: Path) -> Dataset:
    """Read prompts as conversations with TRL's column names."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return Dataset.from_list([{"prompt": [row["messages"]], "gt_answer": row["gt_answer"]} for row in rows])


def make_config(arguments: argparse.Namespace, out_dir: Path) -> GRPOConfig:
    """Configure GRPO like ours: loss per sample, standardised within the group, no KL."""
    num_samples = arguments.prompts_per_step * arguments.group_size
    micro_batch = arguments.micro_batch or num_samples
    if num_samples % micro_batch:
        raise SystemExit(f"--micro-batch {micro_batch} does not divide the {num_samples} samples of a step")
    return GRPOConfig(
        output_dir=str(out_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_samples // micro_batch,
        steps_per_generation=num_samples // micro_batch,
        num_generations=arguments.group_size,
        num_iterations=1,
        max_steps=arguments.steps,
        max_completion_length=arguments.max_new_tokens,
        use_vllm=False,
        use_transformers_continuous_batching=arguments.continuous_batching,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    """Train, and write the times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="write the times to this file")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, help="samples; default: those of a step")
    parser.add_argument("--reward", default="parity", help="a function of bench_rewards.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=0, help="steps before the first stop")
    parser.add_argument("--stop-every", type=int, help="steps between two stops; default: none")
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' own, in place of generate()")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reward = Reward(arguments.reward, arguments.group_size)

    def write_and_stop(num_steps: int) -> None:
        counts = {"mean_length": reward.mean_length, "constant_groups": reward.constant_groups}
        result = {"step_s": clock.step_s, "cpu_s": clock.cpu_s, **counts}
        arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
        since = num_steps - arguments.warm_up
        if arguments.stop_every and since >= 0 and since % arguments.stop_every == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what is freed is left to the other side
            os.kill(os.getpid(), signal.SIGSTOP)

    clock = Clock(write_and_stop)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=reward,
        args=make_config(arguments, arguments.json.parent),
        train_dataset=read_prompts(arguments.model / "prompts.jsonl"),
        callbacks=[clock],
    )
    trainer.train()


if __name__ == "__main__":
    main()
