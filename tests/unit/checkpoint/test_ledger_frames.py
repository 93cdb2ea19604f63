"""Test that a damaged ledger gives the records before the damage or an error, and never a wrong record."""

import itertools
import random
import threading
import zlib
from functools import partial

import numpy as np
import pytest

from coati_rl.batching.packed_group import PackedGroup, as_packed
from coati_rl.checkpoint import ledger_frames, ledger_writer
from coati_rl.checkpoint.ledger_files import (
    append,
    begin_segment,
    delete_segments,
    read_ledger,
    segment_of,
    segments_in,
)
from coati_rl.checkpoint.ledger_frames import LedgerError, Record, encode_frame, read_frames
from coati_rl.checkpoint.ledger_groups import group_from_bytes, group_to_bytes
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.errors import RunError

START = Record(kind="start", fields={"step": 0})


def record(number, *, size=20):
    return Record(kind="leased", fields={"uid": f"train-{number}.0"}, body=bytes([number % 256]) * size)


def write(segment, frames, *, first=START):
    """A segment of one frame per list of records."""
    sizes = [begin_segment(segment, [first.to_bytes()])]
    for number, records in enumerate(frames, start=1):
        frame = encode_frame([each.to_bytes() for each in records], segment=segment.number, number=number)
        append(segment.path, frame, size=sum(sizes))
        sizes.append(len(frame))
    return sizes


@pytest.fixture
def ledger(tmp_path):
    """A ledger of one segment, four frames and seven records, and the lengths of its frames."""
    segment = segment_of(tmp_path / "ledger", 1)
    return segment, write(segment, [[record(1), record(2)], [record(3), record(4)], [record(5), record(6)]])


def uids(segment):
    return [each.fields.get("uid", each.kind) for each in read_ledger(segment.path.parent)]


ALL = ["start", *(f"train-{number}.0" for number in range(1, 7))]


def test_records_come_back_in_their_order_with_fields_and_bodies(ledger):
    segment, _ = ledger
    assert [*read_ledger(segment.path.parent)] == [START, *(record(number) for number in range(1, 7))]


def test_frames_of_an_earlier_version_which_zlib_compressed_are_read_beside_others(ledger, monkeypatch):
    segment, sizes = ledger
    with monkeypatch.context() as earlier:
        earlier.setattr(ledger_frames.zstandard, "compress", zlib.compress)
        frame = encode_frame([record(7).to_bytes()], segment=segment.number, number=len(sizes))
    append(segment.path, frame, size=sum(sizes))
    assert uids(segment) == [*ALL, "train-7.0"]


def test_a_last_frame_that_is_cut_at_any_length_is_left_out_and_the_ones_before_are_whole(ledger):
    segment, sizes = ledger
    whole = segment.path.read_bytes()
    for length in range(len(whole) - sizes[-1], len(whole)):
        segment.path.write_bytes(whole[:length])
        assert uids(segment) == ALL[:5], length
    segment.path.write_bytes(whole)
    assert uids(segment) == ALL


def test_a_last_frame_of_which_pages_are_missing_is_left_out(ledger):
    segment, sizes = ledger
    whole = segment.path.read_bytes()
    kept = len(whole) - sizes[-1]
    for tail in (bytes(sizes[-1]), whole[kept : kept + 40] + bytes(sizes[-1] - 40), b"CRL1" + bytes(200)):
        segment.path.write_bytes(whole[:kept] + tail)
        assert uids(segment) == ALL[:5]


def test_damage_before_the_last_frame_is_an_error_with_file_frame_and_place(ledger):
    segment, sizes = ledger
    whole = segment.path.read_bytes()
    for place in range(sum(sizes[:-1])):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        segment.path.write_bytes(damaged)
        frame = sum(sum(sizes[: number + 1]) <= place for number in range(len(sizes)))
        with pytest.raises(LedgerError, match=rf"segment-000001\.ledger: frame {frame}, at byte {sum(sizes[:frame])} "):
            uids(segment)


def assert_no_wrong_record(tmp_path, *, num_copies):
    """Damage copies of 139 records in 24 frames: flips of bits, and in every second copy a cut as well."""
    rng = random.Random(0)
    sizes = iter(rng.choices(range(400), k=138))
    frames = [[record(6 * frame + each, size=next(sizes)) for each in range(6)] for frame in range(23)]
    segment = segment_of(tmp_path / "ledger", 1)
    write(segment, frames)
    whole = segment.path.read_bytes()
    right = [START, *itertools.chain(*frames)]
    assert [*read_frames(whole, segment=1, may_be_torn=True)] == right and len(right) == 139
    num_errors = 0
    for _ in range(num_copies):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            found = [*read_frames(bytes(damaged), segment=1, may_be_torn=True)]
        except LedgerError:
            num_errors += 1
            continue
        assert found == right[: len(found)]
    assert 0 < num_errors < num_copies, "both ways of an answer are reached"


def test_after_any_damage_there_is_an_error_or_a_beginning_of_what_was_written(tmp_path):
    assert_no_wrong_record(tmp_path, num_copies=500)


@pytest.mark.full
def test_after_any_damage_of_10_000_copies_there_is_an_error_or_a_beginning_of_what_was_written(tmp_path):
    assert_no_wrong_record(tmp_path, num_copies=10_000)


def test_an_earlier_segment_may_not_be_cut_and_none_may_be_missing(tmp_path):
    directory = tmp_path / "ledger"
    for number in (1, 2, 3):
        write(segment_of(directory, number), [[record(number)]], first=START if number == 1 else record(9))
    assert len([*read_ledger(directory)]) == 6
    second = segment_of(directory, 2).path
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(LedgerError, match=r"segment-000002\.ledger: frame 1, "):
        [*read_ledger(directory)]
    second.unlink()
    with pytest.raises(LedgerError, match=r"segment-000002\.ledger is missing"):
        [*read_ledger(directory)]


def test_what_is_before_a_start_is_void_even_if_it_is_damaged(tmp_path):
    directory = tmp_path / "ledger"
    for number in (1, 2):
        write(segment_of(directory, number), [[record(number)]])
    segment_of(directory, 1).path.write_bytes(b"anything")
    assert uids(segment_of(directory, 2)) == ["start", "train-2.0"]


def test_a_frame_of_another_segment_is_not_taken(tmp_path):
    first, second = (segment_of(tmp_path / "ledger", number) for number in (1, 2))
    write(second, [[record(1)]])
    first.path.write_bytes(second.path.read_bytes())
    second.path.unlink()
    assert [*read_ledger(first.path.parent)] == [], "the last segment has no frame of its own"


def test_a_ledger_that_is_not_there_is_empty(tmp_path):
    assert [*read_ledger(tmp_path / "ledger")] == []


def test_a_group_comes_back_bit_for_bit(group_of, forked_group):
    for group in (group_of([(1.0, 2), (float("nan"), 3, "invalid")], uid="p0"), forked_group()):
        packed = as_packed(group)
        logprobs = np.linspace(-9, -0.1, len(packed.logprobs), dtype=np.float32)
        packed = PackedGroup(
            **{name: getattr(packed, name) for name in PackedGroup.__slots__} | {"logprobs": logprobs, "lease_id": 3}
        )
        group = packed.unpack(group.prompt, temperature=group.temperature)
        back = group_from_bytes(group_to_bytes(group), lease_id=3, prompt_of={"p0": group.prompt}.__getitem__)
        again = as_packed(back)
        assert (back.lease_id, back.temperature, again.trajectories) == (3, group.temperature, packed.trajectories)
        assert again.token_ids.tobytes() == packed.token_ids.tobytes()
        assert again.logprobs.tobytes() == packed.logprobs.tobytes()
        assert [str(score) for score in back.scores] == [str(score) for score in group.scores]


class TestWriter:
    @pytest.fixture
    def directory(self, tmp_path):
        return tmp_path / "ledger"

    def started(self, directory, **options):
        writer = LedgerWriter(directory, **{"batch_s": 0.01, **options})
        writer.begin([START.to_bytes], is_start=True)
        return writer

    def test_a_record_that_is_waited_for_is_on_the_disk_and_the_batch_is_not_waited_for(self, directory):
        writer = self.started(directory, batch_s=60.0)
        number = writer.append(record(1).to_bytes)
        assert number > writer.num_durable
        writer.wait_durable(number, timeout_s=10)
        assert uids(segment_of(directory, 1)) == ["start", "train-1.0"]

    def test_records_that_nobody_waits_for_are_written_after_the_batch_time(self, directory):
        writer = self.started(directory)
        number = writer.append(record(1).to_bytes)
        with writer._changed:
            assert writer._changed.wait_for(lambda: writer.num_durable >= number, 10)

    def test_segments_before_a_complete_checkpoint_are_deleted(self, directory):
        writer = self.started(directory)
        writer.append(record(1).to_bytes)
        for step in (2, 4):
            writer.begin([Record(kind="checkpoint", fields={"step": step}).to_bytes], step=step)
            writer.append(record(step).to_bytes)
        writer.flush(timeout_s=10)
        assert [each.number for each in segments_in(directory)] == [1, 2, 3]
        writer.drop_before(4)
        writer.flush(timeout_s=10)
        assert uids(segment_of(directory, 3)) == ["checkpoint", "train-4.0"]
        assert [each.number for each in segments_in(directory)] == [3]

    def test_a_new_start_replaces_what_was_there(self, directory):
        self.started(directory).flush(timeout_s=10)
        self.started(directory).flush(timeout_s=10)
        assert [each.number for each in segments_in(directory)] == [2]

    def test_past_the_limit_decisions_are_written_and_groups_are_not_until_a_checkpoint(self, directory, caplog):
        writer = self.started(directory, max_bytes=300)
        add = partial(writer.append, group_bytes=150)
        for number in range(4):
            add(Record(kind="finished", fields={"uid": number}, body=random.Random(number).randbytes(150)).to_bytes)
        writer.append(record(9).to_bytes)
        writer.flush(timeout_s=10)
        assert uids(segment_of(directory, 1)) == ["start", 0, 1, "train-9.0"]
        assert [each.message for each in caplog.records] == [
            f"{directory} has reached --ledger-max-gb: until the next checkpoint rollouts are not written to it"
        ]
        writer.begin([Record(kind="checkpoint", fields={"step": 2}).to_bytes], step=2)
        writer.drop_before(2)
        add(record(5).to_bytes)
        writer.flush(timeout_s=10)
        assert uids(segment_of(directory, 2)) == ["checkpoint", "train-5.0"]

    def test_groups_that_wait_for_a_slow_disk_are_bounded(self, directory, monkeypatch):
        monkeypatch.setattr(ledger_writer, "_MAX_BYTES_QUEUED", 250)
        writer, is_slow = self.started(directory), threading.Event()

        def encode():
            assert is_slow.wait(60)
            return record(1).to_bytes()

        numbers = [writer.append(encode, group_bytes=100) for _ in range(4)]
        entered = []

        def add():
            with writer.room(100, timeout_s=10):
                entered.append(writer.append(encode, group_bytes=100))

        waiting = threading.Thread(target=add)
        waiting.start()
        waiting.join(0.1)
        assert entered == [] and writer.num_durable < numbers[0]
        is_slow.set()
        waiting.join(60)
        assert entered == [numbers[-1] + 1]
        writer.flush(timeout_s=10)
        assert uids(segment_of(directory, 1)) == ["start", *["train-1.0"] * 5]

    def test_a_disk_that_is_full_is_a_problem_and_what_was_written_stays(self, directory, monkeypatch):
        import errno
        import os

        writer = self.started(directory)
        writer.append(record(1).to_bytes)
        writer.flush(timeout_s=10)
        real = os.write

        def half(descriptor, data):
            if len(data) < 40:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data[: len(data) // 2])

        monkeypatch.setattr(os, "write", half)
        writer.append(record(2).to_bytes)
        with pytest.raises(RunError, match=r"segment-000001\.ledger cannot be written: No space left on device; free"):
            writer.flush(timeout_s=10)
        assert uids(segment_of(directory, 1)) == ["start", "train-1.0"]
        assert "No space left" in writer.problem

    def test_deleting_earlier_segments_leaves_no_gap(self, directory):
        for number in (1, 2, 3):
            write(segment_of(directory, number), [])
        delete_segments(directory, before=3)
        assert [each.number for each in segments_in(directory)] == [3]
