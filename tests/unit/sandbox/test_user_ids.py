"""User ids of sandboxes: no two of a machine are the same while both are in use."""

import os
import subprocess
import sys

import pytest

from coati_rl.errors import ConfigError
from coati_rl.sandbox import user_ids
from coati_rl.sandbox.user_ids import claim_user_id

IN_ANOTHER_PROCESS = """
import os, sys
os.getpid = lambda: int(sys.argv[1])
from coati_rl.sandbox.user_ids import claim_user_id
print(claim_user_id()[0])
"""


def test_processes_whose_ids_are_5000_apart_have_sandboxes_of_different_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4321)
    user, claim = claim_user_id()
    with claim:
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(4321 + 5000)]
        other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 60_000 <= user < 65_000
    assert 60_000 <= int(other.stdout) < 65_000
    assert int(other.stdout) != user


def test_an_id_is_free_again_when_its_sandbox_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_ids, "_FIRST", 70_000)  # none of a sandbox that runs meanwhile
    monkeypatch.setattr(user_ids, "_NUM", 2)
    (first, held), (second, freed) = claim_user_id(), claim_user_id()
    assert {first, second} == {70_000, 70_001}
    with held, pytest.raises(ConfigError, match="user ids, 70000 to 70001, are all taken"):
        claim_user_id()
    with freed:
        again, claim = claim_user_id()
        claim.close()
    assert again == first
