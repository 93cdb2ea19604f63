"""Test the coordinator of a job on a dataset: the order of its items, a stop, evaluations, the reference pass."""

import json

import numpy as np
import pytest

from coati_rl.batching.dataset_source import DatasetSettings, DatasetSource
from coati_rl.coordinator.dataset_coordinator import TRAIN, DatasetCoordinator, DatasetRunSettings
from coati_rl.coordinator.reference_pass import ReferencePass, model_key
from coati_rl.errors import RunError
from coati_rl.work import EvaluateWork, FinishWork, ReferenceWork, SaveWork, TrainWork, Wait
from tests.unit.numbered_samples import samples_of


@pytest.fixture
def coordinator_of(tmp_path):
    """Settings -> a coordinator of 8 samples, 2 a step, with an evaluation set of 3 if there is an interval."""

    def make(*, resumed=None, eval_interval=None, evaluates=False, num_trainers=1, dp=1, reference=None, **settings):
        sizes = {"batch_size": 2, "micro_batch_size": 2, "trainers_per_dp_rank": num_trainers // dp, "dp": dp}
        source = DatasetSource(samples_of(8), DatasetSettings(**sizes, **settings), resumed=resumed)
        return DatasetCoordinator(
            DatasetRunSettings(
                job="sft",
                num_trainers=num_trainers,
                trainers_per_dp_rank=num_trainers // dp,
                save_interval=settings.get("save_interval"),
                eval_interval=eval_interval,
                evaluation_dir=tmp_path / "eval",
            ),
            source,
            {"held": samples_of(3)} if evaluates else {},
            reference=reference,
            last_evaluated=-1 if resumed is None else resumed["last_evaluated"],
        )

    return make


def items_of(coordinator, *, rank=0, stop_after=None):
    """The items of a rank; the driver stops the run when it has asked for item `stop_after`."""
    items = []
    while not items or not isinstance(items[-1], FinishWork):
        items.append(coordinator.next_work(len(items), rank=rank, timeout_s=0.0))
        if len(items) == stop_after:
            coordinator.stop()
    return items


def kinds(items):
    return " ".join(type(item).__name__.removesuffix("Work").lower() for item in items)


def test_steps_are_followed_by_checkpoints_at_the_interval_and_at_the_end(coordinator_of):
    assert kinds(items_of(coordinator_of())) == "train train train train save finish"
    assert kinds(items_of(coordinator_of(save_interval=3))) == "train train train save train save finish"
    assert kinds(items_of(coordinator_of(save_interval=2))) == "train train save train train save finish"


def test_held_out_samples_are_evaluated_first_at_the_interval_and_last_before_the_checkpoint(coordinator_of):
    items = items_of(coordinator_of(evaluates=True, eval_interval=3))
    assert kinds(items) == "evaluate evaluate train train train evaluate evaluate train evaluate evaluate save finish"
    parts = [item for item in items if isinstance(item, EvaluateWork)]
    assert [part.batch.step for part in parts] == [0, 0, 3, 3, 4, 4]
    assert [part.batch.is_last for part in parts] == [False, True] * 3, "3 samples in parts of 2"
    without = kinds(items_of(coordinator_of(evaluates=True)))
    assert without == "evaluate evaluate train train train train evaluate evaluate save finish"


def test_a_resumed_run_goes_on_with_the_next_step_and_repeats_no_evaluation(coordinator_of):
    whole = items_of(coordinator_of(evaluates=True, eval_interval=2, save_interval=2))
    state = next(item for item in whole if isinstance(item, SaveWork)).data_state
    assert (state["step"], state["last_evaluated"], state["job"]) == (2, 2, "sft")
    rest = items_of(coordinator_of(evaluates=True, eval_interval=2, save_interval=2, resumed=state))
    assert kinds(rest) == "train train evaluate evaluate save finish"
    trained = [[item.batch.samples.token_ids.tolist() for item in items if isinstance(item, TrainWork)]
               for items in (whole, rest)]  # fmt: skip
    assert trained[1] == trained[0][2:]


def test_all_ranks_get_the_same_items_with_their_own_part_of_the_batch(coordinator_of):
    coordinator = coordinator_of(num_trainers=4, dp=2, evaluates=True)
    by_rank = [items_of(coordinator, rank=rank) for rank in range(4)]
    assert len({kinds(items) for items in by_rank}) == 1
    tokens = [[i.batch.samples.token_ids.tolist() for i in items if isinstance(i, TrainWork)] for items in by_rank]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]
    assert all(sorted(a + b) != sorted(a + a) for a, b in zip(tokens[0], tokens[2], strict=True))


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_stop_saves_the_steps_that_were_given_out_and_all_ranks_end_alike(coordinator_of, stop_after):
    coordinator = coordinator_of(num_trainers=2, dp=2)
    items = items_of(coordinator, rank=0, stop_after=stop_after)
    assert kinds(items) == f"{'train ' * stop_after}save finish"
    assert items[-1].step == items[-2].step == stop_after
    assert kinds(items_of(coordinator, rank=1)) == kinds(items)


def test_a_stop_ends_an_evaluation_between_its_parts_and_writes_no_checkpoint_twice(coordinator_of):
    coordinator = coordinator_of(evaluates=True)
    assert kinds(items_of(coordinator, stop_after=1)) == "evaluate finish", "nothing was trained"
    saved = coordinator_of(save_interval=2)
    assert kinds(items_of(saved, stop_after=3)) == "train train save finish"


def test_an_evaluation_that_a_stop_ends_is_due_again_when_the_run_goes_on(coordinator_of):
    intervals = {"evaluates": True, "eval_interval": 2, "save_interval": 2}
    items = items_of(coordinator_of(**intervals), stop_after=5)
    assert kinds(items) == "evaluate evaluate train train evaluate save finish", "its second part is not given out"
    rest = items_of(coordinator_of(**intervals, resumed=items[-2].data_state))
    assert kinds(rest) == "evaluate evaluate train train evaluate evaluate save finish"


def test_records_hold_the_figures_of_the_data_and_come_in_order(coordinator_of):
    coordinator = coordinator_of()
    items_of(coordinator)
    coordinator.report_step(1, {"loss": 2.0})
    assert coordinator.events(0, timeout_s=0.0) == []
    coordinator.report_step(0, {"loss": 1.0})
    first, second = coordinator.events(0, timeout_s=0.0)
    assert (first["step"], first["loss"], first["epoch"]) == (1, 1.0, 0.25)
    assert (second["step"], second["num_samples"], second["num_tokens"]) == (2, 2, 8)
    coordinator.report_saved(4, "step-4")
    assert coordinator.events(2, timeout_s=0.0) == [{"event": "checkpoint", "step": 4, "path": "step-4"}]


def test_an_evaluation_is_a_line_of_the_summary_and_an_event(coordinator_of, tmp_path):
    coordinator = coordinator_of(evaluates=True)
    coordinator.report_evaluation(3, "held", {"loss": 0.5})
    assert json.loads((tmp_path / "eval" / "summary.jsonl").read_text()) == {"step": 3, "task": "held", "loss": 0.5}
    assert coordinator.events(0, timeout_s=0.0)[0]["metrics"] == {"loss": 0.5}
    coordinator.report_evaluation(4, "held", {"loss": float("nan")})
    assert coordinator.events(1, timeout_s=0.0)[0]["metrics"] == {"loss": None}
    (tmp_path / "eval" / "summary.jsonl").unlink()
    (tmp_path / "eval" / "summary.jsonl").mkdir()
    with pytest.raises(RunError):
        coordinator.report_evaluation(4, "held", {"loss": 0.5})


def test_the_status_says_what_is_being_done(coordinator_of):
    coordinator = coordinator_of(evaluates=True)
    assert coordinator.status().text == "the trainers are starting"
    seen = []
    for index in range(8):
        coordinator.next_work(index, rank=0, timeout_s=0.0)
        seen.append(coordinator.status().text)
    assert seen[:2] == [f"held is being evaluated at step 0: part {part} of 2" for part in (1, 2)]
    assert seen[2:6] == [f"step {step} is being trained" for step in (1, 2, 3, 4)]
    assert coordinator.status().idle_s < 60


def scored(work):
    """Score token i of a batch as -i."""
    split = work.batch.samples.split()
    return [-ids[mask].astype(np.float32) for ids, mask in zip(split.token_ids, split.loss_masks, strict=True)]


def test_the_reference_scores_every_sample_first_and_its_file_serves_the_next_run(coordinator_of, tmp_path):
    sizes = DatasetSettings(dp=2, trainers_per_dp_rank=1, batch_size=4, micro_batch_size=2)
    sets = {TRAIN: samples_of(8), "held": samples_of(3)}

    def reference(model="m"):
        return ReferencePass(sets, sizes, tmp_path / "reference_logprobs.npz", model=model)

    coordinator = coordinator_of(num_trainers=2, dp=2, evaluates=True, reference=reference())
    index = 0
    while isinstance(work := coordinator.next_work(index, rank=1, timeout_s=0.0), ReferenceWork):
        other = coordinator.next_work(index, rank=0, timeout_s=0.0)
        assert len(work.batch.samples.lengths) + len(other.batch.samples.lengths) == (4, 4, 3)[index]
        assert isinstance(coordinator.next_work(index + 1, rank=1, timeout_s=0.0), ReferenceWork | Wait)
        coordinator.report_reference(work.part, scored(work), rank=1)
        coordinator.report_reference(other.part, scored(other), rank=0)
        index += 1
        if index == 3:
            break
    freed = coordinator.next_work(3, rank=0, timeout_s=0.0)
    assert freed == ReferenceWork(part=-1, batch=None)
    evaluated = coordinator.next_work(4, rank=0, timeout_s=0.0)
    assert isinstance(evaluated, EvaluateWork)
    split = evaluated.batch.samples.split()
    for ids, mask, logprobs in zip(split.token_ids, split.loss_masks, split.arrays["ref_logprobs"], strict=True):
        assert np.all(logprobs == -ids[mask])

    again = items_of(coordinator_of(reference=reference()))
    assert kinds(again) == "reference train train train train save finish", "the model is freed at once"
    batch = again[1].batch.samples.split()
    assert np.all(batch.arrays["ref_logprobs"][0] == -batch.token_ids[0][1:])
    assert not reference("other").is_complete, "of another model"


def test_a_reference_whose_weights_were_replaced_is_another_model(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    before = model_key(tmp_path)
    (tmp_path / "README.md").write_text("nothing of the model")
    assert model_key(tmp_path) == before
    weights.unlink()
    weights.write_bytes(b"other")
    assert model_key(tmp_path) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"PK\x03\x04 cut off",
        lambda whole: whole.replace(b"PK\x01\x02-\x03-\x00\x00", b"PK\x01\x02-\x03-\x00\x01"),  # "encrypted"
    ],
)
def test_a_damaged_file_of_the_reference_is_computed_again(tmp_path, damage):
    sizes = DatasetSettings(dp=1, trainers_per_dp_rank=1, batch_size=4, micro_batch_size=2)
    path = tmp_path / "reference_logprobs.npz"
    np.savez(path, key=np.array("k"), logprobs=np.zeros(8, np.float32))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert not ReferencePass({TRAIN: samples_of(4)}, sizes, path, model="m").is_complete


def test_scores_that_are_missing_are_waited_for_with_a_reason(coordinator_of, tmp_path):
    sizes = DatasetSettings(dp=1, trainers_per_dp_rank=1, batch_size=8, micro_batch_size=2)
    reference = ReferencePass({TRAIN: samples_of(8)}, sizes, tmp_path / "r.npz", model="m")
    coordinator = coordinator_of(reference=reference)
    coordinator.next_work(0, rank=0, timeout_s=0.0)
    wait = coordinator.next_work(1, rank=0, timeout_s=0.0)
    assert wait == Wait(reason="the reference's log-probabilities are being computed, 0 of 1 parts done")
    coordinator.stop()
    assert isinstance(coordinator.next_work(1, rank=0, timeout_s=0.0), FinishWork)
