"""Test that a run whose files are those of a moment between two checkpoints goes on with what was finished by then."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from coati_rl.checkpoint.ledger_files import LEDGER, last_number, read_ledger, segments_in
from coati_rl.driver import coordinator_actors
from coati_rl.errors import ConfigError
from tests.unit.loops.test_resume_ahead import records_after, samples_after

# Twelve prompts, two a step: each group comes in by itself.
RUNS = {
    "lockstep, a checkpoint every second step": {"save_interval": 2, "inference_microbatch_size": 1},
    "ahead": {"save_interval": 2, "n_behind": 1, "inference_batch_size": 2},
    "ahead, with a greedy baseline": {"save_interval": 2, "n_behind": 1, "inference_batch_size": 2, "algo": "REMAX"},
}


class ImagedCoordinator(coordinator_actors.CoordinatorActor):
    """Copy the run directory after chosen calls, as if everything was killed at that moment."""

    wanted, images = (), {}  # (name of a call, its number) -> the copy

    def __init__(self, prepared, paths, context):
        self._paths, self._num_calls = paths, {}
        super().__init__(prepared, paths, context)

    def put(self, producer_id, groups):
        while self._state.checkpoint_schedule.being_written is not None:
            time.sleep(0.001)  # how long a checkpoint takes decides nothing
        accepted = super().put(producer_id, groups)
        self._note("put")
        return accepted

    def report_step(self, step, metrics):
        super().report_step(step, metrics)
        self._note("step")

    def _note(self, call):
        self._state.ledger.flush(timeout_s=10)
        with self._changed:  # no other call is answered meanwhile
            number = self._num_calls[call] = self._num_calls.get(call, 0) + 1
            if (call, number) in self.wanted:
                run_dir = self._paths.run_dir
                self.images[call, number] = _copy(run_dir, run_dir.parent / f"{call}-{number}" / "run")


def _copy(source: Path, target: Path) -> Path:
    while True:
        try:
            return Path(shutil.copytree(source, target))
        except shutil.Error:  # a file of a checkpoint that is being written got its name
            shutil.rmtree(target)


@pytest.fixture(scope="module")
def prompts(write_prompts):
    return {"dataset": write_prompts("train", 12)}


@pytest.fixture(scope="module")
def run_with_images(run_in_threads, prompts):
    """Changes -> the trace of a run that nothing disturbs, and copies of its directory at moments on the way."""

    def run(changes):
        wanted = {(call, number) for call in ("put", "step") for number in range(3, 12)}
        images = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ImagedCoordinator, "wanted", wanted)
            patch.setattr(ImagedCoordinator, "images", images)
            patch.setattr(coordinator_actors, "CoordinatorActor", ImagedCoordinator)
            whole = run_in_threads({**prompts, **changes}, hold_trainer=True)
        begun = {key: image for key, image in images.items() if [*image.glob("checkpoints/step-*/manifest.json")]}
        assert len(begun) >= 6
        return whole, begun

    return run


@pytest.fixture(scope="module")
def lockstep(run_with_images):
    return run_with_images(RUNS["lockstep, a checkpoint every second step"])


def finished_in(image, step):
    """The uids of the groups that the image's ledger has since a checkpoint, of its weights or earlier ones."""
    records = [*read_ledger(image / LEDGER)]
    begins = [
        place for place, each in enumerate(records) if each.fields.get("num_drawn") and each.fields["step"] == step
    ]
    kept = [each.fields for each in records[begins[-1] :] if each.kind == "finished"] if begins else []
    return {fields["uid"] for fields in kept if all(version <= step for version, _, _ in fields["versions"])}


def assert_goes_on(run_in_threads, whole, image, changes):
    """Resume, and compare with the undisturbed run. Returns: the number of groups taken from the ledger."""
    trace = run_in_threads({**changes, "run_dir": str(image), "checkpoint_path": str(image)}, hold_trainer=True)
    resume = trace.prepared.resume
    taken = {each.group.prompt.uid: each.group.prompt for each in resume.recovered.finished}
    asked = {request.token_ids for engine in trace.engines for request in engine.requests}
    assert asked.isdisjoint({prompt.token_ids for prompt in taken.values()}), "no token of them is generated again"
    assert samples_after(trace, resume.step) == samples_after(whole, resume.step)
    assert records_after(trace, resume.step) == records_after(whole, resume.step)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=0)
    (noted,) = map(json.loads, (image / "resumes.jsonl").read_text().splitlines())
    assert noted["groups_of_ledger"] == len(taken)
    return len(taken)


def test_finished_rollouts_are_not_sampled_again_and_every_bit_is_the_undisturbed_runs(
    lockstep, run_in_threads, prompts
):
    whole, images = lockstep
    changes, num_taken = {**prompts, **RUNS["lockstep, a checkpoint every second step"]}, []
    for image in [images[key] for key in sorted(images)][1::5]:
        step = max(int(path.parent.name[5:]) for path in image.glob("checkpoints/step-*/manifest.json"))
        expected = len(finished_in(image, step))
        num_taken.append(assert_goes_on(run_in_threads, whole, _copy(image, image.with_name("again")), changes))
        assert num_taken[-1] == expected
    assert any(0 < number < 4 for number in num_taken), "in the middle of a rollout step"


@pytest.mark.full
@pytest.mark.parametrize("kind", RUNS)
def test_at_every_moment_also_ahead_of_the_weights(run_with_images, run_in_threads, prompts, kind):
    whole, images = run_with_images(RUNS[kind])
    num_taken = [assert_goes_on(run_in_threads, whole, image, {**prompts, **RUNS[kind]}) for image in images.values()]
    assert sum(number > 0 for number in num_taken) >= 3


@pytest.fixture
def ahead_of_checkpoint(lockstep, tmp_path):
    """A copy of an image that has finished groups after its checkpoint, and how many."""
    _, images = lockstep
    image = next(
        image for image in images.values() if finished_in(image, 2) and (image / "checkpoints/step-2").is_dir()
    )
    return _copy(image, tmp_path / "run")


def resumed(run_in_threads, prompts, run_dir, **changes):
    sizes = RUNS["lockstep, a checkpoint every second step"]
    return run_in_threads({**prompts, **sizes, "run_dir": str(run_dir), "checkpoint_path": str(run_dir), **changes})


@pytest.mark.full
def test_a_run_killed_again_before_its_next_checkpoint_still_has_what_the_first_one_finished(
    ahead_of_checkpoint, lockstep, run_in_threads, prompts
):
    finished = finished_in(ahead_of_checkpoint, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImagedCoordinator, "wanted", {("step", 1)})
        patch.setattr(ImagedCoordinator, "images", images := {})
        patch.setattr(coordinator_actors, "CoordinatorActor", ImagedCoordinator)
        resumed(run_in_threads, prompts, ahead_of_checkpoint)
    again = images["step", 1]
    assert finished <= finished_in(again, 2)
    assert_goes_on_from = {**prompts, **RUNS["lockstep, a checkpoint every second step"]}
    (again / "resumes.jsonl").unlink()
    assert assert_goes_on(run_in_threads, lockstep[0], again, assert_goes_on_from) >= len(finished)


class BegunAgainCoordinator(coordinator_actors.CoordinatorActor):
    """Take over from a coordinator of the resumed run that has ended before it has written anything."""

    def __init__(self, prepared, paths, context):
        before = last_number(paths.run_dir / LEDGER)
        super().__init__(prepared, paths, context, takes_over_after=before)
        assert last_number(paths.run_dir / LEDGER) == before + 1, "it has begun the run's ledger"


def test_a_coordinator_that_ends_before_it_has_written_anything_is_replaced_from_the_checkpoint(
    ahead_of_checkpoint, lockstep, run_in_threads, prompts
):
    changes = {**prompts, **RUNS["lockstep, a checkpoint every second step"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_actors, "CoordinatorActor", BegunAgainCoordinator)
        assert assert_goes_on(run_in_threads, lockstep[0], ahead_of_checkpoint, changes) > 0


@pytest.mark.full
def test_with_other_settings_everything_is_sampled_again(ahead_of_checkpoint, run_in_threads, prompts):
    trace = resumed(run_in_threads, prompts, ahead_of_checkpoint, temperature=0.5)
    assert trace.prepared.resume.recovered is None
    assert {group.temperature for group in trace.groups} == {0.5} and len(trace.groups) == 8


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.full), 1.0])
def test_rollouts_of_a_resumption_with_other_settings_are_those_of_no_later_one(
    ahead_of_checkpoint, run_in_threads, prompts, temperature
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImagedCoordinator, "wanted", {("put", 2)})
        patch.setattr(ImagedCoordinator, "images", images := {})
        patch.setattr(coordinator_actors, "CoordinatorActor", ImagedCoordinator)
        resumed(run_in_threads, prompts, ahead_of_checkpoint, temperature=0.5)
    assert finished_in(images["put", 2], 2), "all is killed before its next checkpoint"
    trace = resumed(run_in_threads, prompts, images["put", 2], temperature=temperature)
    changes = ("temperature was 1.0 and is 0.5 now",) if temperature == 0.5 else ()
    assert trace.prepared.resume.changes == changes, "the checkpoint's settings are compared"
    assert trace.prepared.resume.num_recovered == 0
    assert {group.temperature for group in trace.groups} == {temperature} and len(trace.groups) == 8


@pytest.mark.full
def test_a_run_that_goes_on_in_another_directory_takes_up_the_same_and_leaves_the_first_as_it_is(
    ahead_of_checkpoint, run_in_threads, prompts, tmp_path
):
    before = {path: path.read_bytes() for path in (ahead_of_checkpoint / LEDGER).iterdir()}
    finished = finished_in(ahead_of_checkpoint, 2)
    trace = resumed(
        run_in_threads,
        prompts,
        tmp_path / "other",
        checkpoint_path=str(ahead_of_checkpoint / "checkpoints" / "step-2"),
    )
    assert {each.group.prompt.uid for each in trace.prepared.resume.recovered.finished} == finished
    assert trace.prepared.resume.line().endswith(
        f"step-2, and takes up {len(finished)} finished rollouts of the ledger, which are not sampled again"
    )
    assert {path: path.read_bytes() for path in (ahead_of_checkpoint / LEDGER).iterdir()} == before


def test_a_damaged_ledger_is_refused_and_with_no_ledger_all_is_sampled_again_and_none_is_left(
    ahead_of_checkpoint, run_in_threads, prompts
):
    path = segments_in(ahead_of_checkpoint / LEDGER)[-1].path
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resumed(run_in_threads, prompts, ahead_of_checkpoint)
    assert f"its run's ledger cannot be used: {path}: frame 0, at byte 0 of" in str(caught.value)
    assert str(caught.value).endswith("or add --no-ledger")
    assert len(resumed(run_in_threads, prompts, ahead_of_checkpoint, ledger=False).groups) == 8
    assert segments_in(ahead_of_checkpoint / LEDGER) == []
