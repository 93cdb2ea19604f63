"""Test what is asked of NCCL without a GPU: with --all through the real cupy, libnccl's place being stub_nccl.c's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coati_rl.errors import TransferError
from coati_rl.transport import nccl

ROOT = Path(__file__).parents[3]
STUB = Path(__file__).with_name("stub_nccl.c")
PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # the library that cupy asks for by the name libnccl.so.2
from coati_rl.errors import TransferError
from coati_rl.transport.nccl import connect, create_unique_id

unique_id = create_unique_id()

def refusal(**changes):
    try:
        connect(**{"unique_id": unique_id, "rank": 1, "world_size": 2} | changes)
    except TransferError as error:
        return str(error)

json.dump({
    "unique_id": unique_id,
    "joined": type(connect(unique_id=unique_id, rank=1, world_size=2)).__name__,
    "another id": refusal(unique_id="00" * 128),
    "half an id": refusal(unique_id="00" * 64),
    "no id": refusal(unique_id="xyz"),
    "no such rank": refusal(rank=2),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    library = tmp_path_factory.mktemp("stub") / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, STUB], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(library)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.full
def test_a_rank_joins_with_the_id_that_another_has_made(seen: dict[str, str]) -> None:
    assert sorted(bytes.fromhex(seen["unique_id"]))[-1] == 255, "bytes above 127 too"
    assert seen["joined"] == "NcclCommunicator"


@pytest.mark.full
def test_what_cupy_and_nccl_refuse_is_a_transfer_error(seen: dict[str, str]) -> None:
    assert seen["another id"] == "rank 1 of 2, connecting: NCCL_ERROR_INVALID_USAGE: invalid usage"
    assert seen["half an id"] == "rank 1 of 2, connecting: commId length 64 != 128."
    assert seen["no id"].startswith("rank 1 of 2, connecting: non-hexadecimal number")
    assert seen["no such rank"] == "rank 2 of 2, connecting: NCCL_ERROR_INVALID_ARGUMENT: invalid argument"


def test_what_a_communicator_raises_is_a_transfer_error_that_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world_size: int, unique_id: bytes, rank: int) -> None:
        assert (world_size, len(unique_id), rank) == (2, 128, 1)
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: invalid usage")  # as cupy's NcclError is

    monkeypatch.setattr(nccl, "_import_nccl", lambda: SimpleNamespace(NcclCommunicator=refuse))
    for unique_id, reason in (("00" * 128, "NCCL_ERROR_INVALID_USAGE: invalid usage"), ("xyz", "non-hexadecimal")):
        with pytest.raises(TransferError, match=f"rank 1 of 2, connecting: {reason}"):
            nccl.connect(unique_id=unique_id, rank=1, world_size=2)
