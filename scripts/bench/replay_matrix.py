"""Replay random steps of runs in six layouts, and count those in which every stage agrees (docs/replay.md).

    OMP_NUM_THREADS=1 python scripts/bench/replay_matrix.py --model DIR --out DIR [--steps 100] [--json FILE]

In: a model that answers its own train.jsonl (scripts/make_tiny_model.py). Out: a row for each run, with its layout, the
steps that were replayed, how many agree in every stage, and the largest relative difference of a gradient's tensor.
Runs are real ones, in float32 but for ZeRO 1, which has bfloat16 weights: RL with KL to a reference in all layouts,
agents whose every second turn is a fork in two, DPO in five. Each writes a checkpoint at every second step, so that
half of the steps have to be trained again. A run that is in --out already is not repeated. Load does not disturb it.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati.replay import parts
from coati_rl.replay.replay import Replay
from coati_rl.replay.stage import first_difference
from coati_rl.run_reader.run_directory import RunDirectory

LAYOUTS = {
    "dp2": ["-t", "2"],
    "tp2": ["-t", "2", "-tp", "2"],
    "pp2": ["-t", "2", "-pp", "2"],
    "ZeRO 1": ["-t", "2", "-zero", "1"],
    "FSDP2": ["-t", "2", "--plugin", "fsdp2"],
    "shared prefixes": ["-t", "1", "-tmbs", "8"],
}
JOBS = {"RL with KL": [*LAYOUTS], "agents with forks": ["dp2", "shared prefixes"], "DPO": [*LAYOUTS][:5]}
RUN_TIMEOUT_S = 900
# Earlier answers are not written as they were sampled, so that every later turn is rendered anew.
FORKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}(said){% else %}{{ message['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENVIRONMENT = '''
class Again:
    """Ask twice; an answer is worth the share of its characters that are digits."""

    def reset(self, task):
        pass

    def step(self, action):
        worth = sum(each.isdigit() for each in action.text) / max(1, len(action.text))
        return [{"role": "user", "content": "How many?"}], worth, action.turn >= 1, {}
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Describe a run, and what its replays have found."""

    job: str
    layout: str
    num_replayed: int
    num_agree: int
    largest: float  # relative difference of a tensor of a gradient, from a checkpoint of the step
    whole: float  # likewise, of the whole gradient as one vector
    difference: float  # likewise, norm of the whole gradient's difference, estimated
    num_rounded: int  # replays from a checkpoint in which rounding had to explain a tensor
    num_retrained: int  # replays that trained steps again
    largest_retrained: float  # of those, of a tensor
    whole_retrained: float  # of those, of the whole gradient
    failures: list[str]
    seconds: float  # of a replay, mean


def write_inputs(model: Path, out: Path) -> None:
    """Write pairs for DPO, and the environment and the template of agents."""
    rows = [json.loads(line) for line in (model / "train.jsonl").read_text().split("\n")[:400] if line]
    pairs = [
        {"messages": [row["messages"]], "chosen": f"\\boxed{{{row['gt_answer']}}}", "rejected": "\\boxed{0}"}
        for row in rows
    ]
    (out / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (out / "again.py").write_text(ENVIRONMENT)
    (out / "forking.jinja").write_text(FORKING_TEMPLATE)


def command_of(job: str, layout: str, model: Path, out: Path, run_dir: Path, *, num_steps: int) -> list[str]:
    """Return the command line of a run."""
    common = ["-m", str(model), *LAYOUTS[layout], "--device", "cpu", "-lr", "3e-4"]
    common += ["--precision", "bf16" if layout == "ZeRO 1" else "fp32"]
    common += ["-si", "2", "--max-steps", str(num_steps), "--run-dir", str(run_dir)]
    if "-tmbs" not in common:
        common += ["-tmbs", "2"]
    program = [sys.executable, "-m", "coati_rl.command_line"]
    if job == "DPO":
        return [*program, "dpo", "-d", str(out / "pairs.jsonl"), "-tbs", "4", *common]
    rollouts = ["-b", "transformers", "-i", "1", "-g", "4", "-tbs", "4", "-tMbs", "2", "-mnt", "24", "-mpt", "128"]
    per_step = 4 * (2 if layout in ("dp2", "ZeRO 1", "FSDP2") else 1)
    rollouts += ["-ibs", str(per_step), "-imbs", str(per_step), "-d", str(model / "train.jsonl"), "-kl", "0.05"]
    if job == "RL with KL":
        return [*program, "rl", *rollouts, "-rt", "boxed", *common]
    agents = ["--env", f"{out / 'again.py'}:Again", "--chat-template", str(out / "forking.jinja")]
    return [*program, "rl", *rollouts, *agents, "--max-turns", "2", "--max-episode-tokens", "256", *common]


def run(command: list[str], run_dir: Path) -> None:
    """Run a command to its end. Raises: SystemExit with the end of its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{run_dir.name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


def replay(job: str, layout: str, run_dir: Path, steps: list[int]) -> Row:
    """Replay steps of a run."""
    begin, failures, num_rounded = time.perf_counter(), list[str](), 0
    largest, whole, difference = ({True: 0.0, False: 0.0} for _ in range(3))
    replays = Replay(RunDirectory(run_dir), parts())
    saved = {start.step for start in replays.starts}
    for step in steps:
        stages = [*replays.stages(step)]
        if (first := first_difference(stages)) is not None:
            failures.append(f"step {step}: {first.name}: {first.text}")
        for stage in stages:
            if stage.name == "gradient" and (found := re.search(r"relative difference ([\d.e+-]+)", stage.text)):
                is_saved = step - 1 in saved
                largest[is_saved] = max(largest[is_saved], float(found[1]))
                num_rounded += is_saved and "rounds by" in stage.text
                as_one = re.search(r"one vector (\S+) off \(norm of the difference about (\S+)\)", stage.text)
                for figures, number in zip((whole, difference), as_one.groups() if as_one else (), strict=False):
                    figures[is_saved] = max(figures[is_saved], float(number))
    return Row(
        job=job,
        layout=layout,
        num_replayed=len(steps),
        num_agree=len(steps) - len(failures),
        largest=largest[True],
        whole=whole[True],
        difference=difference[True],
        num_rounded=num_rounded,
        largest_retrained=largest[False],
        whole_retrained=whole[False],
        num_retrained=sum(step - 1 not in saved for step in steps),
        failures=failures,
        seconds=(time.perf_counter() - begin) / max(1, len(steps)),
    )


def main() -> None:
    """Run, replay, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--steps", type=int, default=100, help="replays over all runs")
    parser.add_argument("--run-steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the steps that are chosen")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_inputs(given.model, given.out)
    cases = [(job, layout) for job, layouts in JOBS.items() for layout in layouts]
    rng, rows = random.Random(given.seed), list[dict[str, Any]]()
    chosen = rng.sample([(case, step) for case in cases for step in range(1, given.run_steps + 1)], given.steps)
    for job, layout in cases:
        run_dir = given.out / re.sub(r"\W+", "_", f"{job} {layout}")
        if not run_dir.is_dir():
            run(command_of(job, layout, given.model, given.out, run_dir, num_steps=given.run_steps), run_dir)
        row = replay(job, layout, run_dir, sorted(step for case, step in chosen if case == (job, layout)))
        rows.append({name: getattr(row, name) for name in Row.__slots__})
        print(
            f"{job:<18} {layout:<16} {row.num_agree:>3} of {row.num_replayed:<3} agree, "
            f"{row.num_retrained} trained again, tensors {row.largest:.1e} and {row.largest_retrained:.1e}, "
            f"as one vector {row.whole:.1e} and {row.whole_retrained:.1e}, difference {row.difference:.1e}, "
            f"rounding decides {row.num_rounded}, {row.seconds:.1f} s",
            *row.failures,
            sep="\n    ",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(rows, indent=2) + "\n")
    total = sum(row["num_agree"] for row in rows)
    print(f"{total} of {sum(row['num_replayed'] for row in rows)} steps agree in every stage")


if __name__ == "__main__":
    main()
