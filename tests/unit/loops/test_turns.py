"""Test that a run whose producers and trainers take turns is the run that they have on devices of their own."""

import gc
import json
import shutil

import pytest
import torch

import consumer.tensor_offload
from coati_rl.errors import ConfigError
from coati_rl.work import FinishWork, HandOverWork, RepeatWork, SaveWork, SyncWork, TrainWork
from producer.engines.fake_engine import _FakeCore

TURNS = {"colocate": True, "n_behind": 0}
LETTERS = {SyncWork: "s", TrainWork: ".", RepeatWork: ":", SaveWork: "c", FinishWork: "f"}
TIMES = ("train_s", "step_s", "time_s", "idle", "per_second", "wait_s", "sync_s", "memory", "_seconds")
CASES = {
    "plain": {},
    "evaluated": {"eval_interval": 1},
    "a checkpoint each step": {"save_interval": 1},
    "two updates": {"updates_per_batch": 2},
    "a critic": {"algo": "PPO", "critic_lr": 1e-3},
    "a reference": {"kl_coeff": 0.05},
    "adapters": {"lora_rank": 2, "kl_coeff": 0.05},
    "the trainers' old policy": {"old_logprobs": "trainer"},
}


def turns_of(trace):
    """What the trainer did, a letter an item: p and t for hand-overs, s for a sync, . and : for steps, c, f."""
    return "".join(work.to[0] if isinstance(work, HandOverWork) else LETTERS[type(work)] for work in trace.work)


def lines_of(trace, folder):
    paths = sorted((trace.paths.run_dir / folder).rglob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().split("\n")[:-1]]


def metrics_of(trace):
    """Of each step, without times."""
    return [{k: v for k, v in step.items() if not any(part in k for part in TIMES)} for step in trace.steps]


def assert_same_run(left, right):
    assert left.weights.keys() == right.weights.keys()
    assert all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)
    assert lines_of(left, "rollouts") == lines_of(right, "rollouts") != []
    assert metrics_of(left) == metrics_of(right) != []


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Keep what earlier tests have left from the collector, which looks at it in each turn: 0.1 s."""
    gc.freeze()


@pytest.fixture
def more(write_prompts):
    """Further fields of a case."""
    return lambda case: {"eval_dataset": {"held": write_prompts("held", 3)}} if case == "evaluated" else {}


@pytest.fixture(scope="module")
def noted():
    """What moves memory, in order; filled by `in_turns`."""
    return []


@pytest.fixture(scope="module")
def in_turns(run_in_threads, noted):
    def noting(owner, name, text):
        method = getattr(owner, name)

        def call(*arguments, **options):
            noted.append(text)
            return method(*arguments, **options)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        noting(consumer.tensor_offload.TensorOffload, "offload", "trainer out")
        noting(consumer.tensor_offload.TensorOffload, "onload", "trainer in")
        noting(_FakeCore, "sleep", "engine out")
        noting(_FakeCore, "wake", "engine in")
        noting(_FakeCore, "step", "engine step")
        return run_in_threads(TURNS)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
def test_a_run_in_turns_has_the_weights_rollouts_and_metrics_of_one_on_separate_devices(
    run_in_threads, more, case, request
):
    changes = {"n_behind": 0, **CASES[case], **more(case)}
    apart = run_in_threads(changes, hold_trainer=case != "evaluated")
    in_turns = request.getfixturevalue("in_turns") if case == "plain" else run_in_threads(changes | TURNS)
    assert_same_run(apart, in_turns)
    found = [{k: v for k, v in each.items() if k != "time_s"} for each in in_turns.of("evaluation")]
    assert found == [{k: v for k, v in each.items() if k != "time_s"} for each in apart.of("evaluation")]
    assert bool(found) == (case == "evaluated")


def test_a_turn_ends_with_a_rollout_step_and_with_a_sync(in_turns):
    assert turns_of(in_turns) == "ts" + "pt..s" * 2 + "cpf"


@pytest.mark.full
@pytest.mark.parametrize("behind", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_that_is_ahead_trains_a_rollout_step_in_a_turn_with_the_same_bits_each_time(run_in_threads, behind):
    first, again = (run_in_threads({**TURNS, "n_behind": behind, "num_episodes": 3}) for _ in range(2))
    assert turns_of(first) == "ts" + "pt..s" * 6 + "cpf"
    assert [step["staleness_max"] for step in first.steps] == [min(number // 2, behind) for number in range(12)], (
        "two steps a rollout step"
    )
    assert_same_run(first, again)


@pytest.mark.full
def test_a_run_in_turns_whose_models_are_offloaded_too_has_the_same_bits(run_in_threads):
    models = {"kl_coeff": 0.05, "old_logprobs": "trainer", "precision": "bf16"}
    plain, offloaded = (run_in_threads(TURNS | models | more) for more in ({}, {"offload": ("all",)}))
    assert_same_run(plain, offloaded)


def test_one_side_gives_its_memory_up_before_the_other_takes_any(in_turns, noted):
    states = {"trainer": "out", "engine": "in"}
    assert (noted[0], noted[-1]) == ("trainer out", "trainer in"), "its models are whole when the loop has ended"
    for each in noted[1:-1]:
        who, what = each.split()
        if what == "step":
            assert states == {"trainer": "out", "engine": "in"}
            continue
        assert what == "out" or "in" not in states.values(), noted
        states[who] = what


@pytest.mark.full
def test_a_resumed_run_in_turns_has_the_same_weights(run_in_threads, tmp_path):
    whole = run_in_threads({**TURNS, "save_interval": 1})
    shutil.copytree(whole.paths.run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    resumed = run_in_threads({**TURNS, "save_interval": 1, "run_dir": None, "checkpoint_path": str(tmp_path / "run")})
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)


def test_a_producer_that_is_lost_in_its_turn_is_replaced_and_nothing_is_trained_twice(run_in_threads):
    trace = run_in_threads(TURNS, dies_at_request=3)
    assert len(trace.of("producer_lost")) == 1 and [step["step"] for step in trace.steps] == [1, 2, 3, 4]
    uids = [row["uid"] for row in lines_of(trace, "rollouts")]
    assert len(uids) == 16 and all(uids.count(uid) == 2 for uid in uids), "two samples a prompt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inflight_update": True}, "--colocate with --inflight-update"),
        ({"num_inferencer": 2}, "engines have the trainers' devices, and 2 are more than 1; use -i 1, or -t 2"),
    ],
)
def test_what_turns_do_not_allow_is_refused(config_with, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_with(**{**TURNS, **changes})
