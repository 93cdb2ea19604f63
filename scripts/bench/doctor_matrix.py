"""Measure how often `coati-rl doctor RUN` names the right cause first, and how often it raises an alarm for nothing.

Makes tiny runs, each in a process of its own: every fault of `doctor_faults.py` with four seeds, and 40 healthy runs of
varied settings. Seeds 4 to 7 and the second half of the healthy runs are the holdout, with other settings around the
faults; rules were not fitted to them. Writes the confusion matrix as a table, and every finding as JSON.

    python scripts/bench/doctor_matrix.py --model runs/quickstart/tiny-model --out runs/doctor --json doctor.json
    python scripts/bench/doctor_matrix.py ... --diagnose      the runs that are there, again
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from doctor_faults import FAULTS, Variant
from doctor_runs import RecordedRun, run_job, run_to_its_end

from coati_rl.doctor.diagnosis import diagnose
from coati_rl.doctor.run_data import read_run

HEALTHY = "healthy"
SEEDS, HOLDOUT, NUM_HEALTHY = range(4), range(4, 8), 40
RUN_TIMEOUT_S = 240.0
NUM_ROWS = 300
# Around a fault, by seed: the faults of the holdout are met in other runs.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"n_behind": 1, "kl_coeff": 0.0},
    {"temperature": 0.9, "num_generations": 4, "inference_batch_size": 16, "train_microbatch_size": 8},
    {"algo": "DAPO", "max_steps": 20, "dynamic_batching": False, "soft_over_length_punishment": False},
    {"n_behind": 2, "inflight_update": True},
    {
        "learning_rate": 1e-4, "num_generations": 16, "inference_batch_size": 4, "inference_microbatch_size": 4,
        "train_batch_size": 4, "train_minibatch_size": 4
    },
    {"algo": "DR_GRPO", "updates_per_batch": 2},
    {"algo": "CISPO", "num_inferencer": 2, "temperature": 1.1, "max_new_tokens": 48},
)  # fmt: skip
ALGOS = ("GRPO", "DAPO", "DR_GRPO", "GSPO", "CISPO", "RLOO", "SAPO", "REINFORCE_PP", "GMPO", "PPO")


def base(model: Path, run_dir: Path) -> dict[str, Any]:
    """Return the fields of a healthy run: 16 steps of 8 prompts with 8 samples."""
    return {
        "model": str(model), "backend": "transformers", "device": "cpu", "run_dir": str(run_dir),
        "reward_type": "boxed",
        "learning_rate": 3e-4, "num_trainers": 1, "num_inferencer": 1, "num_generations": 8, "inference_batch_size": 8,
        "inference_microbatch_size": 8, "train_batch_size": 8, "train_minibatch_size": 8, "train_microbatch_size": 16,
        "max_new_tokens": 32, "max_prompt_tokens": 128, "max_steps": 16, "num_episodes": 9, "save_interval": -1,
        "eval_interval": 8,
    }  # fmt: skip


def job_base(model: Path, run_dir: Path) -> dict[str, Any]:
    """Return the fields of a healthy job on a dataset: 512 rows, 32 a step, two passes."""
    return {
        "model": str(model), "device": "cpu", "run_dir": str(run_dir), "learning_rate": 1e-4, "train_batch_size": 32,
        "train_microbatch_size": 16, "max_length": 128, "max_epochs": 2, "save_interval": -1, "eval_interval": 8,
    }  # fmt: skip


def healthy_settings(number: int) -> tuple[str, dict[str, Any]]:
    """Return the job and the settings of a healthy run."""
    draw = random.Random(1000 + number)
    job = draw.choices(("rl", "sft", "dpo"), (8, 1, 1))[0]
    if job != "rl":
        return job, {"learning_rate": draw.choice((3e-5, 1e-4, 3e-4)) * (1 if job == "sft" else 0.1), "seed": number}
    batch = draw.choice((4, 8))
    return job, {
        "algo": draw.choice(ALGOS),
        "learning_rate": draw.choice((3e-5, 1e-4, 3e-4)),
        "n_behind": draw.choice((0, 0, 1, 2)),
        "num_inferencer": draw.choice((1, 1, 2)),
        "num_generations": draw.choice((4, 8, 16)),
        "temperature": draw.choice((0.8, 1.0, 1.0, 1.2)),
        "precision": draw.choice(("fp32", "fp32", "bf16")),
        "inference_batch_size": batch * draw.choice((1, 2)),
        "inference_microbatch_size": batch,
        "train_batch_size": batch,
        "train_minibatch_size": batch,
        "max_steps": draw.choice((12, 24, 40)),
        "max_new_tokens": draw.choice((32, 48)),
        "seed": number,
    }


def rows_of(job: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of arithmetic problems in the form of a job."""
    if job == "rl":
        return rows
    made = []
    for row in rows:
        asked, answer = row["messages"]["content"], row["gt_answer"]
        right, wrong = (f"The answer is \\boxed{{{each}}}" for each in (answer, int(answer) + 7))
        if job == "dpo":
            made.append({"prompt": asked, "chosen": right, "rejected": wrong})
        else:
            said = {"role": "assistant", "content": right}
            made.append({"messages": [{"role": "user", "content": asked}, said]})
    return made


def make_run(model: Path, run_dir: Path, variant: Variant, settings: dict[str, Any], seed: int) -> None:
    """Make one run's directory."""
    data = run_dir.with_name(run_dir.name + "-data")
    data.mkdir(parents=True, exist_ok=True)
    job = variant.job
    training, evaluation = (
        rows_of(job, [json.loads(line) for line in (model / name).read_text().split("\n") if line])
        for name in ("train.jsonl", "eval.jsonl")
    )
    random.Random(seed).shuffle(training)
    training, evaluation = training[:NUM_ROWS], evaluation[:32]
    if variant.rows:
        training = variant.rows(training)
    if variant.evaluation:
        evaluation = variant.evaluation(training, evaluation)
    for name, rows in (("train", training), ("eval", evaluation)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = (base if job == "rl" else job_base)(model, run_dir) | settings | variant.changes
    values |= {"dataset": str(data / "train.jsonl"), "eval_dataset": {"held_out": str(data / "eval.jsonl")}}
    values.setdefault("seed", seed)
    if values.get("reference_model"):
        values["reference_model"] = str(other_model(model, data / "other", seed))
    if job == "rl":
        run_to_its_end(RecordedRun(values, **{"score": None, **variant.options}))
    else:
        run_job(job, values)
    if variant.alter:
        variant.alter(run_dir)


def other_model(model: Path, directory: Path, seed: int) -> Path:
    """Make a model of the same architecture with other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.jsonl", "checkpoints"))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(directory)
    return directory


def in_child(log: Path, make: Any, *, kill_when: Any = None) -> str:
    """Call a function in a forked process, with its output in a file. Returns: "" or what went wrong."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            make()
            code = 0
        except BaseException:  # noqa: BLE001, a child of a fork must not go on as its parent
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "" if status == 0 or kill_when else f"ended with {os.waitstatus_to_exitcode(status)}, see {log}"
        if kill_when and kill_when():
            os.kill(child, signal.SIGKILL)
            kill_when = lambda: False  # noqa: E731
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"took longer than {RUN_TIMEOUT_S:.0f} s, see {log}"


def cases(which: str, seeds: Sequence[int] = ()) -> list[tuple[str, int, Variant, dict[str, Any]]]:
    """Return name, seed, variant and settings of all runs of a part: "tuned" or "holdout".

    `seeds`: other ones of the faults than the part's; from 8 on each fault is met amid settings of another strength.
    """
    seeds = seeds or (SEEDS if which == "tuned" else HOLDOUT)
    half = NUM_HEALTHY // 2
    found = []
    for number in range(half) if which == "tuned" else range(half, NUM_HEALTHY):
        job, settings = healthy_settings(number)
        found.append((HEALTHY, number, Variant(job=job), settings))
    for seed in seeds:
        for name, variants in FAULTS.items():
            variant = variants[(seed + seed // len(SETTINGS)) % 4]
            found.append((name, seed, variant, SETTINGS[seed % len(SETTINGS)] if variant.job == "rl" else {}))
    return found


def ensure(model: Path, out: Path, case: tuple[str, int, Variant, dict[str, Any]]) -> str:
    """Make a run unless it is there. Returns: what went wrong."""
    name, seed, variant, settings = case
    run_dir = out / f"{name}-{seed}"
    if (run_dir.with_suffix(".done")).exists():
        return ""
    shutil.rmtree(run_dir, ignore_errors=True)
    metrics = run_dir / "metrics.jsonl"
    kill = (lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5 + seed) if variant.is_killed else None
    problem = in_child(
        run_dir.with_suffix(".log"), lambda: make_run(model, run_dir, variant, settings, seed), kill_when=kill
    )
    if not problem:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        run_dir.with_suffix(".done").touch()
    return problem


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the confusion matrix as lines of Markdown: what was first, by fault."""
    lines = ["| fault | named first | of | otherwise first |", "|---|---|---|---|"]
    for name in [*FAULTS, HEALTHY]:
        firsts = Counter(each["first"] for each in results if each["fault"] == name)
        wanted = "nothing" if name == HEALTHY else name
        others = ", ".join(f"{cause} {number}" for cause, number in firsts.most_common() if cause != wanted)
        if firsts:
            lines.append(f"| `{name}` | {firsts[wanted]} | {firsts.total()} | {others} |")
    return lines


def main() -> int:
    """Make the runs, diagnose them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="of scripts/make_tiny_model.py, with its rows")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--part", choices=("tuned", "holdout"), default="tuned")
    parser.add_argument("--only", nargs="*", help="these faults alone")
    parser.add_argument("--seeds", nargs="*", type=int, default=(), help="of the faults, others than the part's")
    parser.add_argument("--diagnose", action="store_true", help="make no runs")
    parser.add_argument("--json", type=Path, help="write all findings")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for case in cases(given.part, given.seeds):
        name, seed, *_ = case
        run_dir = given.out / f"{name}-{seed}"
        if given.only and name not in given.only:
            continue
        started = time.monotonic()
        if not given.diagnose and (problem := ensure(given.model.absolute(), given.out.absolute(), case)):
            print(f"{name} {seed}: no run: {problem}", flush=True)
            continue
        if not (run_dir / "config.yaml").exists():
            continue
        findings = diagnose(read_run(run_dir))
        first = findings[0].cause if findings else "nothing"
        is_right = first == (name if name != HEALTHY else "nothing")
        print(
            f"{'   ' if is_right else '-> '}{name} {seed}: {', '.join(each.cause for each in findings) or 'nothing'} "
            f"({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        causes = [{"cause": each.cause, "evidence": each.evidence} for each in findings]
        results.append({"fault": name, "seed": seed, "first": first, "is_right": is_right, "findings": causes})
    faults = [each for each in results if each["fault"] != HEALTHY]
    healthy = [each for each in results if each["fault"] == HEALTHY]
    print("\n".join(table(results)))
    print(f"{given.part}: {sum(each['is_right'] for each in faults)} of {len(faults)} faults named first")
    print(f"{given.part}: {sum(not each['is_right'] for each in healthy)} alarms in {len(healthy)} healthy runs")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
