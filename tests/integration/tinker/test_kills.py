"""A server that is killed and started again with the same directory: its client goes on, and all bits are the same."""

import http.client
import random
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tinker_client import Client, ServerProcess

pytestmark = pytest.mark.full

STEPS = 4
FLAGS = ("--save-steps", "3", "--poll-s", "1")
# Calls of the parts that train and sample in a whole loop, by name: a server is killed before each of them once.
CALLS = {
    "sl_loop": {"create": 1, "forward_backward": 4, "optim_step": 4, "save": 3},
    "rl_loop": {"create": 1, "publish": 4, "sample": 4, "forward_backward": 4, "optim_step": 4, "save": 2},
}
POINTS = [
    (loop, f"{name}:{number}")
    for loop, calls in CALLS.items()
    for name, count in calls.items()
    for number in range(1, count + 1)
]


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


def sl_loop(client: Client) -> list[bytes]:
    """Fit rows, and save now and then, as the cookbook's recipe of this name. Returns: all answers' bytes."""
    rng, found = random.Random(0), []
    model, seqs = client.model(client.session(), 0, seed=3), count(1)
    for step in range(STEPS):
        rows = [[rng.randrange(3, 250) for _ in range(rng.randint(3, 9))] for _ in range(3)]
        asked = [client.send_loss(model, next(seqs), rows), client.send_loss(model, next(seqs), rows[:1])]
        stepped = client.step(model, next(seqs))
        found += [*map(client.wait, asked), repr(client.wait(stepped)["metrics"]).encode()]
        if step == 1:
            client.wait(client.post("save_weights", model_id=model, seq_id=next(seqs), path="middle"))
    saved = client.wait(client.post("save_weights", model_id=model, seq_id=next(seqs), path="end"))
    return [
        *found,
        saved["path"].partition("/weights")[2].encode(),
        client.wait(client.send_loss(model, next(seqs), rows)),
    ]


def rl_loop(client: Client) -> list[bytes]:
    """Sample from each step's weights, and learn from what is even. Returns: all answers' bytes."""
    found: list[bytes] = []
    model, seqs = client.model(client.session(), 0, seed=3), count(1)
    for step in range(STEPS):
        sampler = client.sampler(model, next(seqs), step)
        sampled = client.sample(sampler, 0, [5, 6, 7], samples=4, seed=step)
        rewards = [np.mean(np.frombuffer(each.tokens, "<i4") % 2 == 0) for each in sampled.sequences]
        asked = [
            client.send_loss(model, next(seqs), [row], "importance_sampling", **inputs)
            for row, inputs in map(of_sample, sampled.sequences, rewards - np.mean(rewards))
        ]
        stepped = client.step(model, next(seqs))
        found += [sampled.SerializeToString(), *map(client.wait, asked)]
        found.append(repr(client.wait(stepped)["metrics"]).encode())
    saved = client.wait(client.post("save_weights", model_id=model, seq_id=next(seqs), path="end"))
    return [*found, saved["path"].partition("/weights")[2].encode()]


def of_sample(sequence: Any, advantage: float) -> tuple[list[int], dict[str, list[float]]]:
    """Return a sample's tokens, and its inputs of a loss: of the prompt's they are zero."""
    logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
    row = [5, 6, 7, *np.frombuffer(sequence.tokens, "<i4").tolist()]
    return row, {"logprobs": [0.0, 0.0, *logprobs], "advantages": [0.0, 0.0, *[float(advantage)] * len(logprobs)]}


LOOPS = {"sl_loop": sl_loop, "rl_loop": rl_loop}


@pytest.fixture(scope="module")
def undisturbed(model_dir, tmp_path_factory):
    """Name of a loop -> its answers by a server that lives on; each is run once."""

    @cache
    def run(loop: str) -> list[bytes]:
        client = Survivor(model_dir, tmp_path_factory.mktemp(loop), "")
        try:
            found = LOOPS[loop](client)
        finally:
            client.process.end()
        assert client.deaths == 0
        return found

    return run


@pytest.mark.parametrize(("loop", "point"), POINTS)
def test_a_client_goes_on_over_a_kill_to_the_same_bits(model_dir, tmp_path, undisturbed, loop, point):
    client = Survivor(model_dir, tmp_path, point)
    try:
        found = LOOPS[loop](client)
    finally:
        client.process.end()
    assert client.deaths == 1
    assert found == undisturbed(loop)


def test_what_was_acknowledged_is_computed_by_the_next_server(model_dir, tmp_path):
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


def test_a_second_server_of_a_directory_is_refused(model_dir, tmp_path):
    first = ServerProcess(model_dir, tmp_path)
    with pytest.raises(AssertionError, match="another server uses it"):
        ServerProcess(model_dir, tmp_path)
    first.end()
