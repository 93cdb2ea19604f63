"""List the faults of `doctor_matrix.py`: for each cause, what is done to a tiny run from outside, by seed.

Each has four variants that differ in strength or kind, so that a rule is not fitted to one of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coati_rl.types import Score

Rows = list[dict[str, Any]]
ACCEPTED = {"max_logprob_gap": 100.0}  # the run goes on with any gap


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from a healthy run."""

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
    return lambda response, truth: scored(float(is_right := hash(truth) % 100 < 100 * share), is_right=is_right)


def with_answers(answer: Callable[[str], str]) -> Callable[[Rows], Rows]:
    """Return what changes the ground truth of all rows."""
    return lambda rows: [{**row, "gt_answer": answer(row["gt_answer"])} for row in rows]


def first_of(number: int) -> Callable[[Rows], Rows]:
    """Return what keeps the first rows alone."""
    return lambda rows: rows[:number]


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
    from datetime import datetime, timedelta

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
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}",
    "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
)
UNKNOWN = "TimeoutError: the scorer took longer than 10 s"


def _all(values: Any, make: Callable[[Any], Variant]) -> tuple[Variant, ...]:
    return tuple(make(value) for value in values)


def _flags(*changes: dict[str, Any]) -> tuple[Variant, ...]:
    return _all(changes, lambda each: Variant(changes=each))


def _rewards(rewards: Any, **changes: Any) -> tuple[Variant, ...]:
    return _all(rewards, lambda each: Variant(options={"score": each}, changes=changes))


def _engines(*faults: dict[str, Any]) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            changes=ACCEPTED if number % 2 else {},
            options={"faults": {None: each}} if "plain" not in each else each["plain"],
        )
        for number, each in enumerate(faults)
    )


def _letters(text: str) -> float:
    return sum(each.isalpha() for each in text) / max(1, len(text))


TWO = {"num_inferencer": 2}
FAULTS: dict[str, tuple[Variant, ...]] = {
    # ---- data ----
    "wrong_template": (
        *_all(TEMPLATES, lambda each: Variant(changes={"chat_template": each})),
        Variant(changes={"input_template": "{}"}),
    ),
    "evaluation_overlap": _all((1.0, 0.5, 0.1, 0.04), lambda each: Variant(evaluation=overlapping(each))),
    # ---- engine ----
    "stale_weights": _engines(*({"is_stale": True},) * 4),
    "engine_temperature": _engines(*({"heats": each} for each in (1.5, 2.0, 0.6, 3.0))),
    "engine_mismatch": _engines(
        {"noise": 0.02},
        {"noise": 0.1},
        {"plain": {"logprob_error": (0.02, -0.02)}},
        {"plain": {"logprob_error": (0.3, -0.3)}},
    ),
    # ---- rewards ----
    "answer_format": (
        *_flags(*({"reward_type": "think_answer_tags", "system_prompt": ""},) * 2),
        *_rewards(
            [
                lambda response, truth: Score(
                    reward=float("####" in response),
                    answer_correct="####" in response,
                    format_valid="####" in response,
                    verdict="wrong",
                )
            ]
            * 2
        ),
    ),
    "samples_lost": (
        *_rewards((failing(3, UNKNOWN),), max_failure_rate=1.0),
        *_rewards((failing(2, "KeyError: 'answer'"),)),
        Variant(options={"faults": {None: {"refuses": 4}}}, changes={"max_failure_rate": 1.0}),
        Variant(options={"faults": {None: {"refuses": 3}}}),
    ),
    "reward_never_right": (
        *_rewards((constant(0.0),) * 2),
        *_all((lambda truth: "n/a", lambda truth: truth + " km"), lambda each: Variant(rows=with_answers(each))),
    ),
    "reward_always_right": _rewards(
        (constant(1.0), constant(0.5), lambda r, t: scored(1.0, is_right=any(c.isdigit() for c in r)), constant(1.0))
    ),
    "groups_equal": _rewards((by_prompt(0.5), by_prompt(0.3), by_prompt(0.7), by_prompt(0.6))),
    "reward_slow": _rewards((slow(0.05), slow(0.03), slow(0.1), slow(0.05))),
    # ---- sampling ----
    "sampling_too_narrow": _flags({"temperature": 0.05}, {"top_k": 1}, {"top_p": 0.05}, {"temperature": 0.15}),
    "temperature_too_high": _flags(*({"temperature": each} for each in (3.0, 4.0, 6.0, 10.0))),
    "truncation": _flags(*({"max_new_tokens": each} for each in (6, 8, 11, 13))),
    # ---- policy ----
    "learning_rate_too_high": (
        *_flags({"learning_rate": 1e-1}, {"learning_rate": 2e-2}),
        Variant(job="sft", changes={"learning_rate": 1.0}),
        Variant(job="sft", changes={"learning_rate": 0.3}),
    ),
    "learning_rate_too_low": _flags(*({"learning_rate": each} for each in (1e-9, 3e-9, 1e-8, 1e-12))),
    "nothing_in_loss": _flags(
        {"filter_range": [0.95, 1.0]},
        {"filter_range": [0.9, 0.95]},
        {"filter_range": [0.0, 0.05]},
        {"filter_range": [0.51, 0.56], "max_empty_batches": 100},
    ),
    "length_collapse": _rewards(
        (
            graded(lambda text: 1 / (1 + len(text))),
            graded(lambda text: -float(len(text))),
            graded(lambda text: float(len(text) < 20)),
            graded(lambda text: 1 / (1 + len(text))),
        ),
        learning_rate=1e-3,
        max_steps=40,
        kl_coeff=0.0,
    ),
    "length_growth": _rewards(
        (
            graded(lambda text: len(text) / 50),
            graded(lambda text: float(len(text) > 60)),
            graded(lambda text: len(text) / 50),
            graded(lambda text: min(1.0, len(text) / 100)),
        ),
        learning_rate=1e-3,
        max_steps=40,
        kl_coeff=0.0,
        max_new_tokens=64,
    ),
    "entropy_collapse": _rewards(
        (graded(lambda text: float(_letters(text))),) * 4, learning_rate=1e-3, max_steps=40, kl_coeff=0.0
    ),
    "kl_explosion": _rewards(
        (graded(lambda text: float(text.count("e") > 3)),) * 4, learning_rate=1e-3, max_steps=40, kl_coeff=1e-4
    ),
    "repetition": _rewards(
        (graded(lambda text: float(text.count("1"))),) * 4, learning_rate=1e-3, max_steps=40, kl_coeff=0.0
    ),
    "gradient_clipped": _flags(*({"max_grad_norm": each} for each in (1e-2, 1e-3, 3e-3, 1e-4))),
    # ---- machine ----
    "producer_slow": _all(
        (0.1, 0.2, 0.4, 0.8), lambda each: Variant(changes=TWO, options={"faults": {1: {"sleeps_s": each}}})
    ),
    "producers_lost": _all((9, 17, 40, 25), lambda each: Variant(options={"dies_at_request": each})),
    "memory_grows": _all(
        ((64, 2.0), (200, 3.0), (16, 0.3), (1000, 40)), lambda each: Variant(alter=memory_falls(*each))
    ),
    "disk_full": _all(
        ((50, 0.2), (5, 0.01), (400, 40), (20, 0.9)),
        lambda each: Variant(alter=disk_falls(*each), changes={"max_steps": 24}),
    ),
    "clock_jumps": _all((3600.0, -120.0, 45.0, -86400.0), lambda each: Variant(alter=clock_set(each, after=7))),
    "driver_killed": (Variant(is_killed=True),) * 4,
    # ---- jobs on a dataset ----
    "rows_cut": _all((12, 16), lambda each: Variant(job="sft", changes={"max_length": each}))
    + _all((12, 16), lambda each: Variant(job="dpo", changes={"max_length": each})),
    "pairs_equal": _all(
        (2, 3, 4, 5),
        lambda each: Variant(
            job="dpo",
            rows=lambda rows: [
                {**row, "rejected": row["chosen"]} if i % each == 0 else row for i, row in enumerate(rows)
            ],
        ),
    ),
    "overfitting": _all(
        (8, 16, 24, 32),
        lambda each: Variant(
            job="sft", rows=first_of(each), changes={"max_epochs": 30 * 32 // each, "learning_rate": 1e-3}
        ),
    ),
    "other_reference": (Variant(job="dpo", changes={"reference_model": "OTHER"}),) * 4,
}
