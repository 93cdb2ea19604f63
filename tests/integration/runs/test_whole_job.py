"""Test the guarantees of one run with real vLLM and a real ColossalAI plugin.

DAPO at temperature 0.7, an engine of one rank (with --all also of two), two trainers, untied embeddings, evaluations,
checkpoints, prompts half of which can teach nothing, and a coordinator that is killed.
"""

import json
from collections import Counter
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from tests.integration.runs.places import is_closed_to_others, listening_addresses, unix_listeners
from tests.integration.runs.records import assert_complete, assert_engine_and_trainer_agree, lines, read_rollouts

NEVER_RIGHT = "123456789"  # the model guesses 1, 2 or 3
NUM_PROMPTS = 32
GROUP_SIZE = 8
PROMPTS_PER_STEP = 4  # tbs 2 * dp 2 = P * ibs: K = 1


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["tp1", "tp2"])
def run(request, make_tiny, start_shared_run, flags, tmp_path_factory):
    """The run in its second step, with an engine of one or of two ranks."""
    model, data = make_tiny(tied=False), tmp_path_factory.mktemp("data") / "half.jsonl"
    rows = lines(model / "train.jsonl")[:NUM_PROMPTS]
    for row in rows[::2]:
        row["gt_answer"] = NEVER_RIGHT
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = json.dumps({"arithmetic": str(model / "eval.jsonl")})
    run = start_shared_run(
        *flags(model, trainers=2, samples=GROUP_SIZE),
        *("-d", data, "--algo", "DAPO", "-temp", 0.7, "-ptp", request.param, "-ed", evaluation, "-ei", 2, "-si", 2),
        name=f"tp{request.param}",
    )
    run.wait_for_step(1)
    return run


@pytest.fixture(scope="module")
def records(run):
    """Of the finished run."""
    return assert_complete(run)


def test_trainers_and_producers_have_cores_of_their_own(run):
    actors = [process for kind in ("ray::ProducerActor", "ray::TrainerActor") for process in run.processes(kind)]
    share = max(1, len(psutil.Process().cpu_affinity()) // 3)
    assert [len(actor.cpu_affinity()) for actor in actors] == [share] * 3
    assert {actor.environ().get("CUDA_VISIBLE_DEVICES") for actor in actors} == {""}, "a run on the CPU finds no GPU"


def test_while_it_goes_on_nobody_else_on_the_machine_or_beyond_it_reaches_anything_of_it(run):
    processes = [psutil.Process(run.process.pid), *run.processes()]
    (raylet,) = run.processes("raylet/raylet")
    scratch = Path(raylet.environ()["TMPDIR"])
    assert {"ray"} < {path.name for path in Path(f"/proc/{raylet.pid}/root{scratch}").iterdir()}, "what is protected"
    assert not is_closed_to_others(raylet, Path("/tmp"))
    assert is_closed_to_others(raylet, scratch)
    assert listening_addresses(processes) == {ip_address("127.0.0.1")}
    assert all(name.startswith(f"{scratch}/") for name in unix_listeners(processes))
    assert unix_listeners(processes)


def test_a_coordinator_that_is_killed_is_replaced(run):
    (coordinator,) = run.processes("ray::CoordinatorActor")
    coordinator.kill()
    run.wait_for_text("the coordinator was lost; another goes on")
    (other,) = run.processes("ray::CoordinatorActor")
    assert other.pid != coordinator.pid


def test_untied_embeddings_survive_every_sync_at_any_temperature(records):
    assert len(records) >= 3
    assert_engine_and_trainer_agree(records)


def test_dapo_fills_every_step_with_effective_prompts(run, records):
    assert all(record["samples_in_loss"] > PROMPTS_PER_STEP * GROUP_SIZE // 2 for record in records)
    rollouts, num_trained = read_rollouts(run), len(records) * PROMPTS_PER_STEP
    total, filtered = (sum(record[key] for record in records) for key in ("groups_total", "groups_filtered"))
    assert filtered >= NUM_PROMPTS // 4, "half of the prompts teach nothing; those after the last step are not counted"
    assert total - filtered == num_trained
    assert set(Counter(sample["uid"] for sample in rollouts).values()) == {GROUP_SIZE}, "no prompt is rolled out twice"
    trained = {sample["uid"] for sample in rollouts if sample["is_trained"]}
    assert len(trained) == num_trained
    impossible = {sample["uid"] for sample in rollouts if sample["gt_answer"] == NEVER_RIGHT}
    assert impossible and not trained & impossible


def test_evaluations_and_checkpoints_come_when_they_are_due_and_at_the_end(run, records):
    from transformers import AutoModelForCausalLM

    last = len(records)
    due = [step for step in range(1, last) if step % 2 == 0]
    assert [line["step"] for line in lines(run.run_dir / "eval" / "summary.jsonl")] == [0, *due, last]
    checkpoints = run.run_dir / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {f"step-{step}" for step in (*due, last)}
    AutoModelForCausalLM.from_pretrained(checkpoints / f"step-{last}")


def test_what_a_run_leaves_is_its_directory_no_process_no_temporary_file_and_no_shared_memory(run, records):
    assert list((run.run_dir / "tensorboard").iterdir()) and (run.run_dir / "config.yaml").is_file()
    assert run.left_over() == []
