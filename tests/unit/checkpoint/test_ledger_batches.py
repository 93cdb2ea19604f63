"""Test that a wait for a record hurries the batch that it is in, and not the next one."""

import threading

from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.checkpoint.ledger_writer import LedgerWriter

WAIT_S = 10.0


def test_a_wait_for_a_batch_that_is_being_written_does_not_hurry_the_next_one(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def slow() -> bytes:
        begun.set()
        assert go.wait(WAIT_S)
        return Record(kind="named", fields={"uid": "slow"}).to_bytes()

    writer = LedgerWriter(tmp_path / "ledger", batch_s=60.0)
    writer.begin([slow], is_start=True)
    waiting = [threading.Thread(target=writer.flush, kwargs={"timeout_s": WAIT_S}) for _ in range(2)]
    waiting[0].start()
    assert begun.wait(WAIT_S), "the first wait has its batch written"
    waiting[1].start()
    waiting[1].join(0.2)  # for the same batch
    go.set()
    for thread in waiting:
        thread.join(WAIT_S)
    number = writer.append(Record(kind="named", fields={"uid": "next"}).to_bytes)
    with writer._changed:
        assert not writer._changed.wait_for(lambda: writer.num_durable >= number, 0.3), "60 s are a batch's time"
    writer.wait_durable(number, timeout_s=WAIT_S)
