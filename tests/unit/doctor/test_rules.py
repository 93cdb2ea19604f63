"""Test each rule on the smallest run that it is about, and that an ordinary run has no finding.

A run is 16 steps; `series` gives a metric's values. What is not given is that of an ordinary run.
"""

from dataclasses import replace
from graphlib import TopologicalSorter

import pytest

from coati_rl.doctor.diagnosis import RULES, diagnose
from coati_rl.doctor.driver_log import DriverLog
from coati_rl.doctor.policy_rules import ends_in_loop
from coati_rl.doctor.run_data import RunData
from coati_rl.doctor.source_files import SourceFiles, markers_of
from coati_rl.doctor.spans import EndedSpan, covered_s
from coati_rl.run_reader.rollout import RecordedRollout

N = 16
ORDINARY = {
    "reward_mean": 0.5, "reward_std": 0.5, "answer_accuracy": 0.5, "format_accuracy": 1.0, "truncated_fraction": 0.0,
    "response_tokens_mean": 20.0, "entropy_mean": 0.3, "constant_group_fraction": 0.3, "groups_total": 8,
    "distinct_response_fraction": 0.5, "samples_in_loss": 64, "samples_invalid": 0, "samples_failed": 0, "loss": 0.01,
    "grad_norm": 0.5, "learning_rate": 1e-4, "kl_mean": 0.0, "clip_fraction": 0.0, "logprob_gap_mean": 1e-7,
    "trainer_idle_fraction": 0.3, "memory_available_gib": 16.0, "disk_free_gib": 100.0, "samples_skipped": 0,
}  # fmt: skip
CONFIG = {"num_inferencer": 1, "num_generations": 8, "temperature": 1.0, "max_new_tokens": 64, "max_grad_norm": 1.0}
JOB = {"max_length": 100, "loss_on": "assistant", "max_grad_norm": 1.0}
LINE = {
    "step": 1, "uid": "train-1.0", "sample": 0, "episode": 0, "prompt": "1 + 1?", "gt_answer": "42", "response": "no",
    "num_tokens": 2, "finish_reason": "stop", "policy_versions": [0, 0], "reward": 0.0, "verdict": "wrong",
    "detail": "", "is_trained": True, "advantage": 0.0,
}  # fmt: skip


def run(config=CONFIG, rollouts=(), **changes):
    """A run whose metrics are the ordinary ones but for `changes`: a number, or a list of numbers over the steps."""
    fields = {name: changes.pop(name) for name in [*changes] if name in RunData.__dataclass_fields__}
    metrics = ORDINARY | changes if config is CONFIG or "num_inferencer" in config else changes
    steps = [
        {"step": n + 1, "time_s": 10.0 * n}
        | {key: value[n] if isinstance(value, list) else value for key, value in metrics.items()}
        for n in range(N)
    ]
    lines = tuple(RecordedRollout.of(LINE | each) for each in rollouts)
    return RunData(config=config, steps=steps, first_rollouts=lines, last_rollouts=lines, **fields)


def ramp(first, last):
    return [first + (last - first) * n / (N - 1) for n in range(N)]


def spans(actor, name, seconds, number=10):
    return tuple(EndedSpan(actor=actor, name=name, begin_s=n * 2.0, end_s=n * 2.0 + seconds) for n in range(number))


def probes(*gaps):
    return [{"step": n, "probe_gap_mean": gap, "digest": str(n)} for n, gap in enumerate(gaps)]


SURE = [{"rollout_logprobs": [-0.3, -0.3]}] * 40
WIDE = [{"rollout_logprobs": [-1.2 - 0.01 * n, -1.2]} for n in range(40)]
NEVER = {"answer_accuracy": 0.0, "reward_mean": 0.0, "reward_std": 0.0, "constant_group_fraction": 1.0}
EQUAL = {"constant_group_fraction": 1.0, "reward_std": 0.5}
OTHER = SourceFiles(own_template="<|im_start|>", vocabulary_markers=frozenset({"<|im_start|>"}))
CASES = {
    "wrong_template": run(CONFIG | {"chat_template": "[INST]"}, answer_accuracy=0.02, sources=OTHER),
    "evaluation_overlap": run(sources=SourceFiles(shared_rows={"held": (3, 100)})),
    "stale_weights": run(syncs=probes(1e-6, 1e-6, 0.02)),
    "engine_temperature": run(logprob_gap_mean=0.2, syncs=probes(1e-6, 1e-6), rollouts=WIDE),
    "engine_mismatch": run(logprob_gap_mean=0.2, syncs=probes(1e-6, 1e-6), rollouts=SURE),
    "answer_format": run(**NEVER, format_accuracy=0.0, rollouts=[{"response": "It is 42."}, {}] * 10),
    "samples_lost": run(samples_invalid=4),
    "reward_never_right": run(**NEVER),
    "reward_always_right": run(answer_accuracy=1.0, reward_mean=1.0, reward_std=0.0, constant_group_fraction=1.0),
    "sampling_too_narrow": run(CONFIG | {"top_k": 1}, distinct_response_fraction=0.125, **EQUAL),
    "groups_equal": run(**EQUAL),
    "reward_falls": run(reward_mean=ramp(0.9, 0.2), reward_std=0.3),
    "learning_rate_too_high": run(reward_mean=[0.6, *[0.0] * 15], kl_mean=[0.0, *[5.0] * 15]),
    "learning_rate_too_low": run(learning_rate=1e-9),
    "nothing_in_loss": run(CONFIG | {"filter_range": [0.9, 0.95]}, samples_in_loss=0),
    "other_reference": run(kl_mean=0.3),
    "kl_explosion": run(kl_mean=ramp(0.0, 3.0)),
    "samples_skipped": run(samples_skipped=10),
    "gradient_clipped": run(grad_norm=30.0),
    "temperature_too_high": run(CONFIG | {"temperature": 3.0}, entropy_mean=4.0, truncated_fraction=0.9),
    "truncation": run(truncated_fraction=0.4),
    "length_collapse": run(response_tokens_mean=ramp(40.0, 3.0)),
    "length_growth": run(response_tokens_mean=ramp(20.0, 60.0)),
    "repetition": run(rollouts=[{"token_ids": [5, 6, *[7, 8] * 10]}] * 20),
    "entropy_explosion": run(entropy_mean=ramp(0.3, 4.0)),
    "entropy_collapse": run(entropy_mean=ramp(0.5, 0.01), constant_group_fraction=ramp(0.3, 0.9)),
    "disk_full": run(CONFIG | {"max_steps": N}, disk_free_gib=ramp(50.0, 0.3)),
    "memory_grows": run(memory_available_gib=ramp(64.0, 20.0)),
    "producers_lost": run(log=DriverLog(lost=("producer 0 lost: killed",), has_ended=True)),
    "clock_jumps": run(log=DriverLog(step_times=((1, 1000.0), (2, 1010.0), (3, 4620.0)), has_ended=True)),
    "driver_killed": run(log=DriverLog(has_ended=False)),
    "run_failed": run(log=DriverLog(failure="trainer-0 died", has_ended=True)),
    "reward_slow": run(
        trainer_idle_fraction=0.8, spans=(*spans("producer-0", "score", 1.5), *spans("producer-0", "generate", 0.3))
    ),
    "producer_slow": run(
        spans=(*spans("producer-0", "generate", 0.2), *spans("producer-1", "generate", 0.6))
    ),
    "rows_cut": run(JOB, num_samples=32, num_tokens=3190, loss=1.0),
    "pairs_equal": run(JOB, pairs=32, pairs_equal=8, loss=0.7),
    "no_loss_tokens": run(JOB, num_samples=32, num_tokens=1000, loss_tokens=3, loss=1.0),
    "overfitting": run(
        JOB,
        loss=ramp(2.0, 0.1),
        evaluations=[{"step": n, "task": "held", "loss": loss} for n, loss in enumerate((2.0, 1.0, 1.5))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named_first_where_its_signs_are(cause):
    findings = diagnose(CASES[cause])
    assert (findings[0].cause, findings[0].follows_from) == (cause, ())
    assert any(character.isdigit() for character in findings[0].evidence), "evidence has numbers"


def test_every_rule_has_a_case_a_remedy_and_a_docstring_about_its_thresholds():
    assert CASES.keys() == {rule.cause for rule in RULES}
    assert len({rule.cause for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.remedy and rule.says and len(rule.find.__doc__) > 60
        assert set(rule.leads_to) <= CASES.keys()


def test_no_cause_leads_to_itself_by_way_of_others():
    order = TopologicalSorter({rule.cause: rule.leads_to for rule in RULES}).static_order()  # raises CycleError
    assert {*order} == CASES.keys()


HEALTHY = {
    "ordinary": run(),
    "learns": run(
        reward_mean=ramp(0.2, 0.98), answer_accuracy=ramp(0.2, 0.98), entropy_mean=ramp(0.5, 0.05), kl_mean=ramp(0, 0.1)
    ),
    "short": replace(run(), steps=run().steps[:1]),
    "has not begun": replace(run(), steps=()),
    "job": run(JOB, loss=ramp(2.0, 0.5), num_samples=32, num_tokens=1600, loss_tokens=400, grad_norm=1.0),
    "no metric": run({}, **dict.fromkeys(ORDINARY)),
    "goes on": run(log=DriverLog(has_ended=False), is_running=True),
    "bfloat16": run(CONFIG | {"precision": "bf16"}, logprob_gap_mean=0.02, logprob_rounding_mean=0.015),
    "memory of caches": run(memory_available_gib=[16.0 - 3 * (n % 2) for n in range(N)]),
    "own template of a good run": run(CONFIG | {"chat_template": "[INST]"}, sources=OTHER),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name):
    assert diagnose(HEALTHY[name]) == []


def test_what_follows_from_another_finding_stands_behind_all_roots_and_says_so():
    found = diagnose(run(truncated_fraction=1.0, **NEVER, trainer_idle_fraction=0.8))
    assert [(each.cause, each.follows_from) for each in found] == [
        ("truncation", ()),
        ("reward_never_right", ("truncation",)),
        ("groups_equal", ("reward_never_right", "truncation")),
    ]


@pytest.mark.parametrize(
    ("config", "rewards", "first"),
    [
        (CONFIG, ramp(0.2, 1.0), "length_growth"),  # what is said does not matter to the reward
        (CONFIG | {"entropy_coeff": 0.1}, ramp(0.2, 1.0), "entropy_explosion"),
        (CONFIG | {"entropy_target": 3.0}, ramp(0.2, 1.0), "entropy_explosion"),
        (CONFIG, ramp(0.5, 0.5), "entropy_explosion"),
        (CONFIG, ramp(0.5, 0.6), "entropy_explosion"),  # by chance
    ],
)
def test_a_policy_that_is_paid_for_length_becomes_random_by_it_and_not_by_an_entropy_bonus(config, rewards, first):
    longer = {"response_tokens_mean": ramp(20.0, 60.0), "entropy_mean": ramp(0.3, 4.0)}
    assert diagnose(run(config, reward_mean=rewards, reward_std=0.2, **longer))[0].cause == first


def test_a_gradient_that_is_not_finite_is_written_as_null():
    found = diagnose(run(grad_norm=[0.5] * 4 + [None] * 12))
    assert (found[0].cause, found[0].evidence.split(" at a ")[0]) == (
        "learning_rate_too_high",
        "the gradient is not finite in step 5",
    )


def test_a_mismatch_that_stopped_the_run_is_read_from_its_message():
    failure = "in step 1 the log-probabilities of engine and trainer differ by 0.2 nats"
    found = diagnose(run(log=DriverLog(failure=failure, has_ended=True)))
    assert [each.cause for each in found] == ["engine_mismatch", "run_failed"]


def test_markers_are_those_of_special_tokens_and_not_of_jinja():
    text = "{% if x %}<|im_start|>{{ a }}<end_of_turn>[INST] <b>{# <|no|> #}{% endif %}"
    assert markers_of(text) == {"<|im_start|>", "<end_of_turn>", "[INST]", "<|no|>"}


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ("abababababab", True),
        ("xxxxxxxx", True),
        ("xxxxxxx", False),
        ("1 + 2 = 3", False),
        ("no loop here, is it", False),
    ],
)
def test_a_loop_is_a_pattern_of_up_to_twelve_tokens_four_times_and_eight_tokens_at_least(tokens, is_loop):
    assert ends_in_loop(tokens) is is_loop


def test_time_that_spans_share_counts_once():
    made = [
        EndedSpan(actor="a", name="score", begin_s=begin, end_s=end)
        for begin, end in ((0, 2), (1, 3), (5, 6), (5, 5.5))
    ]
    assert covered_s(made) == 4
