"""Test that rollouts in a checkpoint are restored unchanged, and that invalid bytes are refused."""

import io
from dataclasses import fields, replace

import numpy as np
import pytest

from coati_rl.checkpoint.untrained_rollouts import FinishedGroup, UntrainedRollouts
from coati_rl.types import Baseline, Completion, Score
from producer.environments.single_turn import single_turns


@pytest.fixture
def kept(group_of, forked_group):
    """Two groups to be trained and a dropped one; samples are empty, infinite, not ASCII, aborted, forked."""
    completions = (
        Completion(
            token_ids=np.array([151_000, 7], dtype=np.int32),
            logprobs=np.array([-1e-7, -17.3], dtype=np.float32),
            policy_versions=np.array([4, 5], dtype=np.int32),
            finish_reason="abort",
            text='"\ud800ü\n\x00',
        ),
        Completion(
            token_ids=np.empty(0, dtype=np.int32),
            logprobs=np.empty(0, dtype=np.float32),
            policy_versions=np.empty(0, dtype=np.int32),
            finish_reason="length",
            text="",
        ),
    )
    plain = group_of([(1.0, 2), (0.0, 1)], uid="p1")
    odd = replace(
        plain,
        producer_id=3,
        trajectories=single_turns(plain.prompt, completions, temperature=0.7),
        scores=(
            Score(reward=0.1, answer_correct=False, format_valid=True, verdict="wrong", breakdown={"a": 1 / 3}),
            Score(reward=float("inf"), answer_correct=False, format_valid=False, verdict="invalid", detail="late"),
        ),
    )
    spoken = ({"ended": "done", "turns": [{"role": "assistant", "tokens": 1}]}, {"ended": "failed", "turns": []})
    greedy = Score(reward=0.25, answer_correct=False, format_valid=True, verdict="wrong", breakdown={"a": 0.25})
    odd = replace(odd, baseline=Baseline(score=greedy, num_tokens=3))
    forked, dropped = forked_group(uid="p2"), replace(group_of([(1.0, 1), (1.0, 1)], uid="p3"), records=spoken)
    return UntrainedRollouts(
        finished=(FinishedGroup(group=odd, sync_index=-2), FinishedGroup(group=forked, sync_index=0)),
        dropped=(dropped,),
        samples_failed=1,
        sync_index_of={4: -2, 5: -1, 7: 0},
    )


def fields_of(group):
    """All of it, in what `==` compares."""
    trajectories = [
        {
            field.name: (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value
            for field in fields(each)
            for value in [getattr(each, field.name)]
        }
        for each in group.trajectories
    ]
    return group.prompt, group.producer_id, group.temperature, trajectories, group.scores, group.records, group.baseline


def test_what_is_written_is_read(kept):
    prompts = {group.prompt.uid: group.prompt for group in (*(f.group for f in kept.finished), *kept.dropped)}
    read = UntrainedRollouts.from_bytes(kept.to_bytes(), prompts.__getitem__)
    assert [each.sync_index for each in read.finished] == [-2, 0]
    for found, written in zip(read.finished, kept.finished, strict=True):
        assert fields_of(found.group) == fields_of(written.group)
    assert [fields_of(group) for group in read.dropped] == [fields_of(group) for group in kept.dropped]
    assert (read.samples_failed, read.sync_index_of) == (1, {4: -2, 5: -1, 7: 0})


def test_their_leases_are_older_than_those_of_the_run_that_goes_on(kept):
    read = UntrainedRollouts.from_bytes(kept.to_bytes(), lambda uid: kept.dropped[0].prompt)
    assert [each.group.lease_id for each in read.finished] == [-3, -2]


def test_nothing_kept_is_read_as_nothing():
    assert UntrainedRollouts.from_bytes(UntrainedRollouts().to_bytes(), str) == UntrainedRollouts()


def test_what_is_no_such_archive_is_refused(kept):
    def refuse(data, message="cannot be read"):
        with pytest.raises(ValueError, match=message):
            UntrainedRollouts.from_bytes(data, lambda uid: kept.dropped[0].prompt)

    data = kept.to_bytes()
    refuse(b"")
    refuse(data[:-100])
    arrays = dict(np.load(io.BytesIO(data)))

    def archive(**changes):
        buffer = io.BytesIO()
        np.savez(buffer, **{name: array for name, array in (arrays | changes).items() if array is not None})
        return buffer.getvalue()

    refuse(archive(logprobs=None))
    refuse(archive(logprobs=arrays["logprobs"][1:]), r"p3: 2 tokens, 2 in the loss, and arrays of \(2, 2, 1, 2, 2\)")
    refuse(archive(token_ids=np.append(arrays["token_ids"], np.int32(1))), "differ in length")
    refuse(archive(token_ids=arrays["token_ids"].astype(np.int64)))
    refuse(archive(description=np.frombuffer(b"{}", dtype=np.uint8)))
    refuse(archive(description=np.array([{}], dtype=object)), "allow_pickle=False")


def test_a_prompt_that_the_dataset_lacks_is_refused(kept):
    with pytest.raises(ValueError, match="cannot be read: KeyError"):
        UntrainedRollouts.from_bytes(kept.to_bytes(), {}.__getitem__)
