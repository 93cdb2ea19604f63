"""Test the numbers of --dry-run against values computed by hand."""

import pytest

from coati_rl.config.algorithm_rules import algorithm_problems
from coati_rl.config.cli import parse
from coati_rl.config.plan import make_plan, resolve_precision

# P = 3 producers x 8 prompts = 24 per rollout step; dp = 2, so 4 x 2 = 8 per optimizer step; 24 / 8 = 3 steps a sync.
ARGV = "-t 2 -i 3 -ptp 2 -ibs 8 -tbs 4 -tMbs 2 -tmbs 3 -g 5 -nb 1"


def plan_of(text, *, num_prompts=100, device="cpu", **facts):
    return make_plan(parse(text.split())[0], num_prompts=num_prompts, device=device, **facts)


def test_the_plan_is_what_a_person_would_compute():
    plan = plan_of(ARGV)
    told = {line[:24].strip(): line[24:] for line in plan.lines()}
    assert told["devices"] == f"{3 * 2 + 2} (cpu, fp32)"
    assert told["data-parallel groups"] == "2"
    assert told["prompts per step"] == "8"
    assert told["samples per step"] == f"{8 * 5}"
    # 2 mini-batches of 2 groups, which -tmbs 3 does not cut.
    assert told["micro-batches per step"] == f"at least {2 * 2} per dp rank"
    assert told["sync period"] == "3 optimizer step(s)"
    assert told["rollout slots"] == f"{(1 + 1) * 24} prompts"
    assert told["prompts"] == "100"
    assert told["optimizer steps"] == "12"  # 100 // 8


@pytest.mark.parametrize(
    ("change", "num_prompts", "steps"),
    [
        ("-e 2", 100, 25),
        ("--max-steps 3", 100, 3),
        ("--max-steps 300", 100, 12),
        ("--max-steps 3", None, 3),
        ("", None, None),
        ("--updates-per-batch 3", 100, 36),
        ("--updates-per-batch 3 --max-steps 6", 100, 6),
    ],
)
def test_episodes_and_max_steps_decide_how_many_steps_there_are(change, num_prompts, steps):
    assert plan_of(f"{ARGV} {change}", num_prompts=num_prompts).num_steps == steps


@pytest.mark.parametrize(
    ("argv", "device", "precision"),
    [
        ("", "cpu", "fp32"),
        ("", "cuda", "bf16"),
        ("--precision bf16", "cpu", "bf16"),
        ("--precision fp32", "cuda", "fp32"),
        ("-zero 1", "cpu", "bf16"),
        ("-zero 2", "cuda", "bf16"),
    ],
)
def test_precision_is_bf16_on_gpus_and_under_zero_unless_chosen(argv, device, precision):
    assert resolve_precision(parse(argv.split())[0], device) == precision


def test_the_printed_plan_names_each_number():
    assert plan_of(ARGV, num_prompts=None).lines() == [
        "devices                 8 (cpu, fp32)",
        "data-parallel groups    2",
        "prompts per step        8",
        "samples per step        40",
        "micro-batches per step  at least 4 per dp rank",  # a group may be cut for the copies
        "shared prefixes         on: a prompt once for its 5 samples",
        "sync period             3 optimizer step(s)",
        "rollout slots           48 prompts",
        "prompts                 unknown",
        "optimizer steps         unknown",
        "algorithm               GRPO (advantage group_norm, clip 0.2/0.2 per token, sample_level, "
        "KL 0.01 k3 in the loss, old_logprobs of the engine)",
    ]


def test_the_printed_plan_names_what_splits_a_trainer_and_what_is_not_known_yet():
    # T = 8 processes in dp = 2 groups of tp * pp = 4; -tmbs 3 asks for 8 micro-batches, the budget maybe for more.
    lines = plan_of(f"{ARGV} -t 8 -tp 2 -pp 2 -zero 1 --max-tokens-per-microbatch 4096").lines()
    assert lines[0] == "devices                 14 (cpu, bf16)"
    assert lines[1] == "data-parallel groups    2 (tp 2, pp 2, ZeRO stage 1)"
    assert lines[4] == "micro-batches per step  at least 4 per dp rank"
    assert plan_of(f"{ARGV} -t 2 --plugin fsdp2").lines()[1] == "data-parallel groups    2 (FSDP2)"
    lines = plan_of(f"{ARGV} -t 8 -tp 2 --plugin fsdp2 --fsdp-size 2").lines()
    assert lines[1] == "data-parallel groups    4 (tp 2, FSDP2 over 2)"
    lines = plan_of(f"{ARGV} -t 8 --plugin fsdp2 --expert-parallel 4").lines()
    assert lines[1] == "data-parallel groups    8 (ep 4, FSDP2)"
    lines = plan_of(f"{ARGV} -t 8 -tp 2 --context-parallel 2").lines()
    assert lines[1] == "data-parallel groups    2 (cp 2, tp 2)"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("-pp 2", "4 per dp rank"),  # 2 mini-batches of 2 groups, one at a time
        ("-pp 3", "at least 4 per dp rank"),
        ("-pp 3 -tmbs 10", "2 per dp rank"),  # two groups at a time: nothing is cut
        ("-pp 3 --no-shared-prefix", "8 per dp rank"),
        ("-pp 3 -t 6", "at least 4 per dp rank"),
        ("-pp 2 -t 4", "at least 4 per dp rank"),  # for the two copies
        ("-pp 2 -t 4 --no-shared-prefix", "8 per dp rank"),
    ],
)
def test_groups_may_be_cut_for_copies_and_where_they_are_fewer_than_pipeline_stages(change, text):
    trainers = "" if "-t" in change.split() else f"-t {change.split()[1]}"
    assert f"micro-batches per step  {text}" in plan_of(f"{ARGV} {trainers} {change}").lines()


@pytest.mark.parametrize(
    ("change", "micro_batches"),
    [
        ("", 4),  # 2 mini-batches of 2 groups, one at a time
        ("-tmbs 10", 2),
        ("--no-shared-prefix", 8),  # 2 mini-batches of 2 x 5 = 10 samples: 3, 3, 2, 2
        ("--one-sample-per-row", 8),
    ],
)
def test_groups_that_share_a_prompt_are_not_cut_by_the_size_of_micro_batches(change, micro_batches):
    (line,) = [each for each in plan_of(f"{ARGV} {change}").lines() if each.startswith("micro-batches per step")]
    assert line.endswith(f" {micro_batches} per dp rank")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        # 5 x (200 + R) tokens against 200 + 5 R, at R = 32, 128 and 512.
        (
            "",
            "on: a prompt once for its 5 samples; 3.2, 2.0 and 1.3 times fewer tokens with 200 of a prompt and 32, 128 "
            "and 512 of a response",
        ),
        ("--no-shared-prefix", "off"),
        ("--one-sample-per-row", "off: one sample per row"),
        ("-g 1 --algo REINFORCE_PP", ""),
    ],
)
def test_the_plan_says_what_a_shared_prompt_saves(change, line):
    told = [each[24:] for each in plan_of(f"{ARGV} -mnt 512 {change}", prompt_tokens=200.0).lines() if "shared" in each]
    assert told == [line] * bool(line)


@pytest.mark.parametrize(
    ("change", "num_prompts", "line"),
    [
        ("--dynamic-batching", 100, "optimizer steps         at most 12"),
        ("--dynamic-batching --max-steps 3", 100, "optimizer steps         at most 3"),
        ("--dynamic-batching", None, "optimizer steps         unknown"),
        ("--filter-range 0.01,0.99", 100, "optimizer steps         12"),
    ],
)
def test_where_groups_are_replaced_the_prompts_may_fill_fewer_steps(change, num_prompts, line):
    assert plan_of(f"{ARGV} {change}", num_prompts=num_prompts).lines()[-2] == line


def test_the_printed_plan_names_the_parts_that_the_users_flags_have_changed():
    flags = "--algo GSPO --off-policy-correction icepop --whiten-advantages --clip-eps-high 0.001"
    assert plan_of(f"{ARGV} {flags}").lines()[-1] == (
        "algorithm               GSPO (advantage group_norm, whitened, clip 0.0003/0.001 per sequence, "
        "sample_level, no KL, old_logprobs of the trainer, icepop 0.5/5)"
    )


@pytest.mark.parametrize(("max_steps", "nearest"), [(10, "8 or 12"), (3, "4")])
def test_a_run_that_would_end_between_two_updates_of_a_batch_is_refused(max_steps, nearest):
    (problem,) = algorithm_problems(parse(f"--updates-per-batch 4 --max-steps {max_steps}".split())[0])
    assert problem == (
        f"--max-steps {max_steps} with --updates-per-batch 4: counts optimizer steps, and each batch takes 4; "
        f"use --max-steps {nearest}"
    )
    assert not [*algorithm_problems(parse(["--updates-per-batch", "4", "--max-steps", "12"])[0])]
