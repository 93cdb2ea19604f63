"""Run three recipes of tinker-cookbook, unmodified, as `python -m RECIPE` does, in one process that imports them once.

    python -m tests.cookbook_recipes        in a directory with their data sets; TINKER_BASE_URL names the server

`rl_loop` goes on from the checkpoint that `sl_loop` has saved, as from one of its own.
"""

import json
import runpy
import sys
from pathlib import Path

from tinker_recipe_data import NAME

STEPS = {"sl_loop": 32, "rl_loop": 8, "dpo": 4}


def run(name: str, module: str, *arguments: str) -> None:
    sys.argv = [module, f"model_name={NAME}", f"log_path=runs/{name}", f"max_steps={STEPS[name]}", *arguments]
    runpy.run_module(f"tinker_cookbook.recipes.{module}", run_name="__main__", alter_sys=True)


def go_on(name: str, source: str) -> None:
    """Let a recipe find another one's last checkpoint as that of its own step 0."""
    last = json.loads(Path("runs", source, "checkpoints.jsonl").read_text().splitlines()[-1])
    Path("runs", name).mkdir()
    Path("runs", name, "checkpoints.jsonl").write_text(json.dumps({**last, "batch": 0}) + "\n")


if __name__ == "__main__":
    run("sl_loop", "sl_loop", "lora_rank=16", "batch_size=8", "learning_rate=7e-3")
    go_on("rl_loop", "sl_loop")
    sampling = ("batch_size=4", "group_size=16", "max_tokens=6", "loss_fn=importance_sampling")
    run("rl_loop", "rl_loop", *sampling, "learning_rate=2e-3")
    run("dpo", "preference.dpo.train", "dataset=hhh", "batch_size=8", "learning_rate=5e-3")
