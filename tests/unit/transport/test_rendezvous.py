"""Test the invitation that a trainer sends to an engine."""

import json

import pytest

from coati_rl.errors import TransferError
from coati_rl.transport.rendezvous import Rendezvous

GLOO = Rendezvous(backend="gloo", secret="5e" * 16, host="127.0.0.1", port=4711, world_size=4, first_rank=2)
NCCL = Rendezvous(
    backend="nccl", secret="5e" * 16, host="10.0.0.1", port=4711, world_size=2, first_rank=1, unique_id="00ff" * 64
)
SHM = Rendezvous(
    backend="shm", secret="5e" * 16, host="127.0.0.1", port=4711, world_size=2, first_rank=1, unique_id="0f" * 16
)
FILE = Rendezvous(
    backend="file",
    secret="5e" * 16,
    host="127.0.0.1",
    port=4711,
    world_size=2,
    first_rank=1,
    directory="/shared/group-1",
)


@pytest.mark.parametrize("invitation", [GLOO, NCCL, SHM, FILE])
def test_json_and_back_is_the_same_invitation(invitation):
    assert Rendezvous.from_json(invitation.to_json()) == invitation


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "mpi"},
        {"backend": "nccl"},
        {"unique_id": "00"},
        {"backend": "shm"},
        {"backend": "shm", "unique_id": "../../etc/passwd"},
        {"backend": "shm", "unique_id": "00ff"},
        {"backend": "file"},
        {"directory": "/shared/group-1"},
        {"first_rank": 0},
        {"first_rank": 4},
        {"port": "4711"},
        {"surplus": 1},
        {"secret": ""},
        {"secret": "5e"},
    ],
)
def test_a_malformed_invitation_is_refused(change):
    with pytest.raises(TransferError, match="rendezvous"):
        Rendezvous.from_json(json.dumps(json.loads(GLOO.to_json()) | change))
