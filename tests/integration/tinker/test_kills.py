"""A server that is killed and started again with the same directory: its client goes on, and all bits are the same."""

import http.client
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.tinker_client import Client, ServerProcess

STEPS = 7
FLAGS = ("--save-steps", "3", "--poll-s", "1")
# Calls of the training part in a whole loop, by name, and the number of places to kill in before one of them.
CALLS = {"create": 1, "forward_backward": 2 * STEPS, "optim_step": STEPS, "save": 4}
POINTS = [f"{name}:{number}" for name, count in CALLS.items() for number in range(1, count + 1)]
FAST = ("optim_step:4",)


class Survivor(Client):
    """Call a server; when it is gone, start it again and repeat the call, as Tinker's client does."""

    def __init__(self, model: Path, root: Path, die_at: str) -> None:
        self._model, self._root, self.deaths = model, root, 0
        self.process = ServerProcess(model, root, *FLAGS, die_at=die_at)
        super().__init__(self.process.port)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, str]:
        while True:
            try:
                return super().call(method, path, body, **headers)
            except (OSError, http.client.HTTPException):
                assert self.process.wait() != 0
                self.deaths += 1
                self.process = ServerProcess(self._model, self._root, *FLAGS)
                self.port = self.process.port


def loop(client: Client) -> list[bytes]:
    """Train and sample. Returns: all answers' bytes."""
    rng, found, session = random.Random(0), [], client.session()
    model = client.model(session, 0, seed=3)
    seq = 0
    for step in range(STEPS):
        rows = [[rng.randrange(3, 250) for _ in range(rng.randint(3, 9))] for _ in range(3)]
        seq += 3
        asked = [client.send_loss(model, seq - 2, rows), client.send_loss(model, seq - 1, rows[:1])]
        stepped = client.step(model, seq)
        found += [client.wait(each) for each in asked]
        found.append(repr(client.wait(stepped)["metrics"]).encode())
        if step % 3 == 1:
            seq += 1
            sampler = client.sampler(model, seq, step)
            found.append(client.sample(sampler, 0, [5, 6, 7], samples=3, seed=step).SerializeToString())
    saved = client.wait(client.post("save_weights", model_id=model, seq_id=seq + 1, path="end"))
    found.append(saved["path"].partition("/weights")[2].encode())
    found.append(client.wait(client.send_loss(model, seq + 2, [[5, 6, 7, 8]])))
    return found


@pytest.fixture(scope="module")
def undisturbed(model_dir, tmp_path_factory):
    client = Survivor(model_dir, tmp_path_factory.mktemp("undisturbed"), "")
    try:
        found = loop(client)
    finally:
        client.process.end()
    assert client.deaths == 0
    return found


@pytest.mark.parametrize("point", [p if p in FAST else pytest.param(p, marks=pytest.mark.full) for p in POINTS])
def test_a_client_goes_on_over_a_kill_to_the_same_bits(model_dir, tmp_path, undisturbed, point):
    client = Survivor(model_dir, tmp_path, point)
    try:
        found = loop(client)
    finally:
        client.process.end()
    assert client.deaths == 1
    assert found == undisturbed


@pytest.mark.full
def test_what_was_acknowledged_is_computed_by_the_next_server(model_dir, tmp_path, undisturbed):
    client = Survivor(model_dir, tmp_path, "optim_step:1")
    model = client.model(client.session(), 0, seed=3)
    rows = [[5, 6, 7, 8]]
    asked = [client.send_loss(model, seq, rows) if seq % 2 else client.step(model, seq) for seq in range(1, 7)]
    answers = [client.wait(each) for each in asked]  # a call that finds no server starts the next one
    client.process.end()
    assert client.deaths == 1 and len(answers) == 6
    assert all(isinstance(each, bytes) for each in answers[::2])
    assert np.all([answer["metrics"]["grad_norm:mean"] > 0 for answer in answers[1::2]])


def test_a_torn_journal_and_a_changed_model_are_told_and_not_gone_on_from(model_dir, make_model_dir, tmp_path):
    first = ServerProcess(model_dir, tmp_path, *FLAGS, die_at="optim_step:1")
    client = Client(first.port)
    model = client.model(client.session(), 0, seed=3)
    client.wait(client.send_loss(model, 1, [[5, 6, 7, 8]]))
    with suppress(OSError, http.client.HTTPException):  # killed before or after it has acknowledged the call
        client.step(model, 2)
    first.wait()
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes() + b"CoTj\x09")
    second = ServerProcess(make_model_dir(1), tmp_path, *FLAGS)  # other weights under the same name
    client.port = second.port
    answer = client.wait(client.send_loss(model, 3, [[5, 6, 7, 8]]))
    second.end()
    assert "did not come out as before" in answer["error"] and answer["category"] == "user"
    assert "no whole record" in second.log


@pytest.mark.full
def test_a_second_server_of_a_directory_is_refused(model_dir, tmp_path):
    first = ServerProcess(model_dir, tmp_path)
    with pytest.raises(AssertionError, match="another server uses it"):
        ServerProcess(model_dir, tmp_path)
    first.end()
