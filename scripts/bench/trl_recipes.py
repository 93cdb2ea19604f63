"""Train what a recipe trains with TRL, from the same model on the same rows for the same steps, and score its answers.

    python scripts/bench/trl_recipes.py dpo runs/preferences SEED
    python scripts/bench/trl_recipes.py rl runs/reward-model SEED
    python scripts/bench/trl_recipes.py tools runs/tool-use SEED

In: the recipe's files. Out: the model `trl-JOB-SEED` with TRL's log (`trl.json`), and held-out greedy answers:
`eval-trl-JOB-SEED.jsonl`, or with tools the run `eval-trl-tools-SEED`, which evaluates before its single step. Of RL
also those after half the steps, `half-trl-...`. The first call makes TRL's environment. scripts/recipe_report.py then
shows both.
"""

import argparse
import subprocess
from pathlib import Path

from trl_environment import DIRECTORY, HAS_BF16, ensure_trl

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
COATI_RL = REPOSITORY / ".venv" / "bin" / "coati-rl"
HALF = "checkpoint-15"  # of the 30 steps of RL
PRECISION = ["--precision", "bf16" if HAS_BF16 else "fp32"]


class Recipe:
    """Run stages of TRL on the files of a recipe with one seed."""

    def __init__(self, root: Path, seed: str) -> None:
        self.root, self._seed, self._python = root, seed, ensure_trl(DIRECTORY.expanduser())
        fine_tuned = list((root / "sft" / "checkpoints").glob("step-*"))
        self._model = fine_tuned[0] if fine_tuned else root / "SmolLM2-135M-Instruct"

    def train(self, job: str, rows: str, *more: Path) -> Path:
        """Train, unless that was done before; return the model."""
        output = self.root / f"trl-{job}-{self._seed}"
        if not (output / "trl.json").exists():
            program = [self._python, HERE / "trl_recipe_training.py", job, self._model, self.root / rows, output]
            subprocess.run([*map(str, program), self._seed, *map(str, more)], check=True)
        return output

    def answer(self, name: str, model: Path, task: str, max_new_tokens: int) -> None:
        """Score greedy answers to the held-out prompts."""
        reward = ["-rt", f"{REPOSITORY / 'scripts' / task}:score", "-mnt", str(max_new_tokens)]
        flags = [*PRECISION, "-mpt", "80", "-imbs", "64", "-temp", "0", "--overwrite"]
        output = self.root / f"{name}-{self._seed}.jsonl"
        command = [COATI_RL, "generate", "-m", model, "-d", self.root / "task" / "eval.jsonl", "-o", output]
        subprocess.run([*map(str, command), *reward, *flags], check=True)

    def use_tools(self, name: str, model: Path) -> None:
        """Evaluate with the calculator: a run of one step, which evaluates before it."""
        task, run = self.root / "task", self.root / f"{name}-{self._seed}"
        command = [COATI_RL, "rl", "-m", model, "-d", task / "train.jsonl", "-ed", f"held_out={task / 'eval.jsonl'}"]
        tools = "--tools calculator --max-turns 3 -rt boxed -mpt 128 -mnt 48 --max-episode-tokens 256"
        sizes = "-t 1 -i 1 -g 8 -ibs 2 -imbs 2 -tbs 2 -tMbs 2 -tmbs 16 -ei 10 -si -1 --max-steps 1"
        subprocess.run(
            [*map(str, command), *tools.split(), *sizes.split(), *PRECISION, "--run-dir", str(run)], check=True
        )


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=("dpo", "rl", "tools"))
    parser.add_argument("root", type=Path, help="folder of the recipe's files")
    parser.add_argument("seed")
    given = parser.parse_args()
    recipe = Recipe(given.root.resolve(), given.seed)
    if given.job == "dpo":
        recipe.answer("eval-trl-dpo", recipe.train("dpo", "pairs.jsonl"), "instruction_task.py", 48)
    elif given.job == "rl":
        reward_model = recipe.train("reward", "pairs.jsonl", recipe.root / "held-out-pairs.jsonl")
        policy = recipe.train("rl", "task/train.jsonl", reward_model)
        recipe.answer("half-trl-rl", policy / HALF, "style_task.py", 40)
        recipe.answer("eval-trl-rl", policy, "style_task.py", 40)
    else:
        policy = recipe.train("tools", "task/train.jsonl")
        recipe.use_tools("half-trl-tools", policy / HALF)
        recipe.use_tools("eval-trl-tools", policy)


if __name__ == "__main__":
    main()
