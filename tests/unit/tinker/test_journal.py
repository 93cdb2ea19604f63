"""Records survive a kill: what is acknowledged is read again, what is torn is cut off and kept."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from coati_rl.tinker.journal import Journal, Record, read_journal


def write(path: Path, records: list[Record]) -> None:
    async def run() -> None:
        journal = Journal(path)
        await asyncio.gather(*(journal.append(each) for each in records))
        journal.close()

    asyncio.run(run())


def records(count: int) -> list[Record]:
    return [Record(fields={"kind": "n", "n": n, "text": "ß\ud800"}, body=os.urandom(n)) for n in range(count)]


def test_what_was_appended_is_read_again_in_order(tmp_path):
    path, given = tmp_path / "journal", records(50)
    write(path, given[:30])
    write(path, given[30:])
    assert list(read_journal(path)) == given


def test_a_file_cut_at_any_byte_gives_the_whole_records_before_it(tmp_path):
    path, given = tmp_path / "journal", records(3)
    write(path, given)
    whole = path.read_bytes()
    for length in range(len(whole)):
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:length])
        found = list(read_journal(cut))
        assert found == given[: len(found)]
        left = len(whole[:length]) - cut.stat().st_size
        torn = list(tmp_path.glob("cut.torn-*"))
        assert [each.stat().st_size for each in torn] == ([left] if left else [])
        write(cut, given[:1])
        assert list(read_journal(cut)) == [*found, given[0]]
        for each in torn:
            each.unlink()


def test_a_changed_byte_ends_the_journal_before_its_record(tmp_path):
    path, given, rng = tmp_path / "journal", records(8), random.Random(0)
    write(path, given)
    whole = path.read_bytes()
    for _ in range(60):
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :])
        found = list(read_journal(path))
        assert found == given[: len(found)] and len(found) < len(given)


def test_a_rewritten_journal_holds_the_new_records_and_what_follows(tmp_path):
    path, given = tmp_path / "journal", records(9)

    async def run() -> None:
        journal = Journal(path)
        waiting = [asyncio.ensure_future(journal.append(each)) for each in given[:5]]
        await asyncio.sleep(0)
        journal.rewrite(given[5:7])
        await asyncio.gather(*waiting, journal.append(given[7]))
        journal.append_soon(given[8])
        journal.close()

    asyncio.run(run())
    assert list(read_journal(path)) == given[5:]


def test_a_journal_that_cannot_be_written_says_so_to_all_that_follows(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                await journal.append(records(1)[0])

    asyncio.run(run())
    journal.close()
