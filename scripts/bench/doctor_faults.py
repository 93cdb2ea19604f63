"""List the faults of `doctor_matrix.py`: for each cause, what is done to a tiny run from outside, by seed.

Each has four variants that differ in strength or kind, so that a rule is not fitted to one of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

from coati_rl.types import Score

Rows = list[dict[str, Any]]
ACCEPTED = {"max_logprob_gap": 100.0}  # the run goes on with any gap


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Hold the differences from a healthy run."""

    changes: dict[str, Any] = field(default_factory=dict)  # of flags
    options: dict[str, Any] = field(default_factory=dict)  # of `RecordedRun`
    rows: Callable[[Rows], Rows] | None = None  # of the training rows
    evaluation: Callable[[Rows, Rows], Rows] | None = None  # training rows, evaluation rows -> evaluation rows
    alter: Callable[[Path], None] | None = None  # the run's records, for what a tiny machine cannot produce
    job: str = "rl"
    is_killed: bool = False  # the process of the run, after some steps


def scored(reward: float, *, is_right: bool, detail: str = "") -> Score:
    """Return a score."""
    return Score(
        reward=reward, answer_correct=is_right, format_valid=True, verdict="ok" if is_right else "wrong", detail=detail
    )


def constant(reward: float) -> Callable[[str, str], Score]:
    """Return a reward that is the same for all."""
    return lambda response, truth: scored(reward, is_right=reward > 0)


def graded(grade: Callable[[str], float]) -> Callable[[str, str], Score]:
    """Return a graded reward by the response's text alone; what is right is right."""
    return lambda response, truth: scored(grade(response), is_right=f"boxed{{{truth}}}" in response)


def mentioning(text: str) -> Callable[[str, str], Score]:
    """Return a reward that asks for a text that the policy does not write."""

    def score(response: str, truth: str) -> Score:
        has = text in response
        return Score(
            reward=float(has), answer_correct=has, format_valid=has, verdict="ok" if has else "wrong", detail=""
        )

    return score


def slow(seconds: float) -> Callable[[str, str], Score]:
    """Return the right reward, late."""

    def score(response: str, truth: str) -> Score:
        time.sleep(seconds)
        return scored(float(f"boxed{{{truth}}}" in response), is_right=f"boxed{{{truth}}}" in response)

    return score


def failing(one_of: int, detail: str) -> Callable[[str, str], Score]:
    """Return a reward that fails for one of so many responses."""
    seen = iter(range(10**9))

    def score(response: str, truth: str) -> Score:
        if next(seen) % one_of == 0:
            return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail=detail)
        return scored(float(f"boxed{{{truth}}}" in response), is_right=f"boxed{{{truth}}}" in response)

    return score


def by_prompt(share: float) -> Callable[[str, str], Score]:
    """Return a reward that depends on the prompt alone: right for some of them."""

    def score(response: str, truth: str) -> Score:
        is_right = crc32(truth.encode()) % 100 < 100 * share
        return scored(float(is_right), is_right=is_right)

    return score


def with_answers(answer: Callable[[str], str]) -> Callable[[Rows], Rows]:
    """Return what changes the ground truth of all rows."""
    return lambda rows: [{**row, "gt_answer": answer(row["gt_answer"])} for row in rows]


def overlapping(share: float) -> Callable[[Rows, Rows], Rows]:
    """Return what takes a share of the evaluation rows from the training rows."""

    def mix(training: Rows, evaluation: Rows) -> Rows:
        number = int(share * len(evaluation))
        return training[:number] + evaluation[number:]

    return mix


def lines_changed(name: str, change: Callable[[int, dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return what changes the records of a file by their number."""

    def alter(run_dir: Path) -> None:
        path = run_dir / name
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
        for number, record in enumerate(records):
            change(number, record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return alter


def memory_falls(first: float, per_step: float) -> Callable[[Path], None]:
    """Return what records less memory with each step, with a ripple of 1 %."""

    def change(number: int, record: dict[str, Any]) -> None:
        record["memory_available_gib"] = max(0.1, (first - per_step * number) * (1 + 0.01 * (-1) ** number))

    return lines_changed("metrics.jsonl", change)


def disk_falls(first: float, last: float) -> Callable[[Path], None]:
    """Return what records less free space with each step, down to `last` GiB in step 16."""

    def change(number: int, record: dict[str, Any]) -> None:
        record["disk_free_gib"] = first + (last - first) * min(1.0, number / 15)

    return lines_changed("metrics.jsonl", change)


def clock_set(by_s: float, *, after: int) -> Callable[[Path], None]:
    """Return what moves the times of driver.log after a step."""

    def alter(run_dir: Path) -> None:
        path, moved, lines = run_dir / "logs" / "driver.log", False, []
        for line in path.read_text().split("\n"):
            moved = moved or f": step {after}/" in line
            if moved and line[:4].isdigit():
                time_of = datetime.fromisoformat(line[:23].replace(",", ".")) + timedelta(seconds=by_s)
                line = f"{time_of:%Y-%m-%d %H:%M:%S},{time_of.microsecond // 1000:03d}{line[23:]}"
            lines.append(line)
        path.write_text("\n".join(lines))

    return alter


TEMPLATES = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}",
    "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
)
LATE = "TimeoutError: the scorer took longer than 10 s"
TWO = {"num_inferencer": 2}
FOUR_PROMPTS = {
    "num_generations": 16, "inference_batch_size": 4, "inference_microbatch_size": 4, "train_batch_size": 4,
    "train_minibatch_size": 4
}  # fmt: skip
LEARNING = {"learning_rate": 1e-3, "max_steps": 40, "kl_coeff": 0.0}  # fast enough for the reward to be hacked


def of_flag(name: str, *values: Any, **others: Any) -> tuple[Variant, ...]:
    """Return a variant for each value of a flag."""
    return tuple(Variant(changes={name: value, **others}) for value in values)


def of_rewards(*rewards: Callable[[str, str], Score], **changes: Any) -> tuple[Variant, ...]:
    """Return a variant for each reward."""
    return tuple(Variant(options={"score": each}, changes=changes) for each in rewards)


def of_engines(*faults: dict[str, Any]) -> tuple[Variant, ...]:
    """Return a variant for each fault of all engines; every second run goes on with any gap, the others stop."""
    return tuple(
        Variant(changes=ACCEPTED if number % 2 else {}, options={"faults": {None: each}})
        for number, each in enumerate(faults)
    )


def of_alterations(*alterations: Callable[[Path], None], **changes: Any) -> tuple[Variant, ...]:
    """Return a variant for each alteration of records."""
    return tuple(Variant(alter=each, changes=changes) for each in alterations)


def of_job(job: str, name: str, *values: Any) -> tuple[Variant, ...]:
    """Return a variant of a job for each value of a flag."""
    return tuple(Variant(job=job, changes={name: value}) for value in values)


def by_heart(number: int) -> Variant:
    """Return a job that repeats this many rows."""
    changes = {"max_epochs": 960 // number, "learning_rate": 5e-3, "train_batch_size": 8, "train_microbatch_size": 8}
    return Variant(job="sft", rows=lambda rows: rows[:number], changes=changes)


FAULTS: dict[str, tuple[Variant, ...]] = {
    # ---- data ----
    "wrong_template": (*of_flag("chat_template", *TEMPLATES), Variant(changes={"input_template": "{}"})),
    "evaluation_overlap": tuple(Variant(evaluation=overlapping(each)) for each in (1.0, 0.5, 0.2, 0.1)),
    # ---- engine ----
    "stale_weights": of_engines(*({"is_stale": True},) * 4),
    "engine_temperature": of_engines({"heats": 1.5}, {"heats": 2.0}, {"heats": 0.6}, {"heats": 3.0}),
    "engine_mismatch": (
        *of_engines({"noise": 0.02}, {"noise": 0.1}),
        Variant(options={"logprob_error": (0.02, -0.02)}),
        Variant(options={"logprob_error": (0.3, -0.3)}, changes=ACCEPTED),
    ),
    # ---- rewards ----
    "answer_format": (
        *of_flag("reward_type", *("think_answer_tags",) * 2, system_prompt=""),
        *of_rewards(mentioning("####"), mentioning("<answer>")),
    ),
    "samples_lost": (
        *of_rewards(failing(3, LATE), max_failure_rate=1.0),
        *of_rewards(failing(2, "KeyError: 'answer'")),
        Variant(options={"faults": {None: {"refuses": 4}}}, changes={"max_failure_rate": 1.0}),
        Variant(options={"faults": {None: {"refuses": 3}}}),
    ),
    "reward_never_right": (
        *of_rewards(*(constant(0.0),) * 2),
        Variant(rows=with_answers(lambda truth: "n/a")),
        Variant(rows=with_answers(lambda truth: str(int(truth) + 1000))),
    ),
    "reward_always_right": of_rewards(
        constant(1.0), constant(0.5), constant(2.0), lambda text, _: scored(1.0, is_right=any(map(str.isdigit, text)))
    ),
    "groups_equal": of_rewards(*(by_prompt(each) for each in (0.5, 0.3, 0.7, 0.6))),
    "reward_slow": of_rewards(*(slow(each) for each in (0.05, 0.03, 0.1, 0.05))),
    # ---- sampling ----
    "sampling_too_narrow": (
        *of_flag("temperature", 0.05), *of_flag("top_k", 1), *of_flag("top_p", 0.05), *of_flag("temperature", 0.15)
    ),
    "temperature_too_high": of_flag("temperature", 3.0, 4.0, 6.0, 10.0),
    "truncation": of_flag("max_new_tokens", 6, 8, 11, 13),
    # ---- policy ----
    "learning_rate_too_high": (*of_flag("learning_rate", 1e-1, 2e-2), *of_job("sft", "learning_rate", 1.0, 0.3)),
    "learning_rate_too_low": of_flag("learning_rate", 1e-9, 3e-9, 1e-8, 1e-12),
    "nothing_in_loss": of_flag(
        "filter_range", [0.06, 0.07], [0.93, 0.94], [0.12, 0.13], [0.87, 0.88], **FOUR_PROMPTS, max_empty_batches=100
    ),
    "length_collapse": of_rewards(
        graded(lambda text: 1 / (1 + len(text))), graded(lambda text: max(0.0, 1 - len(text) / 60)),
        graded(lambda text: float(len(text) < 20)), graded(lambda text: 1 / (1 + len(text.split()))), **LEARNING
    ),
    "length_growth": of_rewards(
        graded(lambda text: min(1.0, len(text) / 150)), graded(lambda text: min(1.0, len(text.split()) / 40)),
        graded(lambda text: min(1.0, len(text) / 200)), graded(lambda text: min(1.0, len(text) / 100)),
        **LEARNING, max_new_tokens=64
    ),
    "entropy_explosion": of_flag("entropy_coeff", 0.1, 0.3, 1.0, 3.0, **LEARNING | {"max_steps": 20}),
    "gradient_clipped": of_flag("max_grad_norm", 1e-2, 1e-3, 3e-3, 1e-4),
    # ---- machine ----
    "producer_slow": tuple(
        Variant(changes=TWO, options={"faults": {1: {"sleeps_s": each}}}) for each in (0.1, 0.2, 0.4, 0.8)
    ),
    "producers_lost": tuple(Variant(options={"dies_at_request": each}) for each in (9, 17, 40, 25)),
    "memory_grows": of_alterations(*(memory_falls(*each) for each in ((64, 2.0), (200, 6.0), (16, 0.5), (1000, 40)))),
    "disk_full": of_alterations(
        *(disk_falls(*each) for each in ((50, 0.2), (5, 0.01), (400, 0.7), (20, 0.9))), max_steps=16
    ),
    "clock_jumps": of_alterations(*(clock_set(each, after=7) for each in (3600.0, -120.0, 45.0, -86400.0))),
    "driver_killed": (Variant(is_killed=True),) * 4,
    # ---- jobs on a dataset ----
    "rows_cut": (*of_job("sft", "max_length", 17, 16), *of_job("dpo", "max_length", 17, 16)),
    "overfitting": tuple(by_heart(each) for each in (8, 16, 24, 32)),
    "other_reference": (Variant(job="dpo", changes={"reference_model": "OTHER"}),) * 4,
}  # fmt: skip
