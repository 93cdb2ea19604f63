"""Test the store over which gloo's members exchange addresses."""

import gc
from pathlib import Path

from coati_rl.transport.gloo import close_store, connect_store, open_store


def test_a_member_that_leaves_does_not_touch_the_file_that_another_may_be_removing():
    """torch's destructor opens the file again, and waits an hour if it has just been removed."""
    hub, address = open_store("127.0.0.1")
    member = connect_store("127.0.0.1", address)
    hub.set("rank 0", "address")
    assert member.get("rank 0") == b"address"
    before = Path(address).read_bytes()

    del hub, member
    gc.collect()

    assert Path(address).read_bytes() == before
    close_store(address)
    assert not Path(address).parent.exists()
