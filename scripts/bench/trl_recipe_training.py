"""Train as the recipes do, with TRL; trl_recipes.py runs this file in an environment of TRL's own.

    TRL_PYTHON scripts/bench/trl_recipe_training.py JOB MODEL DATA OUTPUT SEED [MORE]

JOB is dpo, reward (a reward model, evaluated on the pairs of the file MORE), rl (against the reward model MORE) or
tools (a calculator). Steps, batches, learning rates,
lengths and temperatures are those of scripts/sft_dpo.sh, reward_model.sh and tool_use.sh; what is not set is TRL's.
"""

import ast
import json
import operator
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    chat_template_utils,
)
from trl_environment import HAS_BF16

Settings = dict[str, Any]

OPTIMIZER: Settings = {"weight_decay": 0.01, "max_grad_norm": 1.0, "warmup_steps": 4, "bf16": HAS_BF16, "use_cpu": True}
LOGGING: Settings = {"report_to": "none", "logging_steps": 1, "disable_tqdm": True}
PAIRS: Settings = {"per_device_train_batch_size": 16, "num_train_epochs": 2, "learning_rate": 5e-5, "max_length": 160}
LINEAR: Settings = {
    "lr_scheduler_type": "linear", "gradient_checkpointing": False, "dataloader_drop_last": True, "save_strategy": "no",
}  # fmt: skip
ROLLOUTS: Settings = {
    "per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "num_generations": 8, "max_steps": 30,
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "loss_type": "grpo", "gradient_checkpointing": False, "save_steps": 15, "save_only_model": True,
}  # fmt: skip
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: In Python's notation, with + - * / // % ** and functions such as sqrt: 2 * (3 + 4) ** 2.
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return ast.literal_eval(node)

    result = value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(result)) if float(result).is_integer() else f"{result:.12g}"


def boxed(completions: list[Any], gt_answer: list[str], **_: object) -> list[float]:
    """Return 1 for a completion whose last answer has the right number in a box."""
    found = [re.findall(r"\\boxed\{([^}]*)\}", messages[-1]["content"] or "") for messages in completions]
    return [float(bool(boxes) and boxes[-1] == answer) for boxes, answer in zip(found, gt_answer, strict=True)]


def conversations(rows: list[dict[str, Any]], system_prompt: str | None) -> Dataset:
    """Return prompts as TRL reads them."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return Dataset.from_list([{"prompt": [*system, row["messages"]], "gt_answer": row["gt_answer"]} for row in rows])


def make_pairs(path: str) -> Dataset:
    """Return pairs of completions as TRL reads them."""
    return Dataset.from_list([{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in read_rows(path)])


def make_trainer(job: str, model: str, data: str, output: str, seed: int, more: str) -> Any:
    """Return TRL's trainer of a job."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    shared: Settings = {"output_dir": output, "seed": seed, **OPTIMIZER, **LOGGING}
    if job == "reward":
        scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        config = RewardConfig(**shared, **PAIRS, **LINEAR)
        pairs = {"train_dataset": make_pairs(data), "eval_dataset": make_pairs(more)}
        return RewardTrainer(scorer, args=config, processing_class=tokenizer, **pairs)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if job == "dpo":
        config = DPOConfig(**shared, **PAIRS, **LINEAR, beta=0.1)
        return DPOTrainer(policy, args=config, train_dataset=make_pairs(data), processing_class=tokenizer)
    rows = read_rows(data)
    of_job: Settings
    if job == "rl":
        of_job = {"learning_rate": 4e-5, "max_completion_length": 40, "temperature": 0.8, "beta": 0.1}
        config = GRPOConfig(**shared, **ROLLOUTS, **of_job)
        prompts = conversations(rows, None)
        return GRPOTrainer(policy, more, args=config, train_dataset=prompts, processing_class=tokenizer)
    tokenizer.response_template = chat_template_utils.qwen3_template  # of calls as Qwen3 writes them, which are these
    of_job = {"learning_rate": 2e-5, "max_completion_length": 144, "temperature": 1.0, "beta": 0.0}
    of_job |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}  # 64 as well, in less memory
    config = GRPOConfig(**{**shared, **ROLLOUTS, **of_job}, max_tool_calling_iterations=2)
    prompts = conversations(rows, SYSTEM_PROMPT)
    return GRPOTrainer(
        policy, boxed, args=config, train_dataset=prompts, processing_class=tokenizer, tools=[calculator]
    )


def main() -> None:
    """Train, and write the model, the trainer's records and the seconds."""
    job, model, data, output, seed, *more = sys.argv[1:]
    trainer = make_trainer(job, model, data, output, int(seed), *more or [""])
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    if job == "reward":
        trainer.evaluate()  # into the log
    trainer.model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(model).save_pretrained(output)
    records = {"seconds": round(seconds), "log": trainer.state.log_history}
    (Path(output) / "trl.json").write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
