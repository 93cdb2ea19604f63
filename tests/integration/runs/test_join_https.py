"""Test machines that join a run over HTTPS, each a real `coati-rl join`: they leave, are killed, stopped, or stay."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.runs.conftest import PATIENCE_S
from tests.integration.runs.records import assert_complete, lines, read_rollouts

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SILENT_S = 10.0  # a producer without a request for so long is lost
PASSES, NUM_PROMPTS, PER_STEP, GROUP_SIZE = 5, 160, 8, 4
FIRST_GROUP_S = 30.0  # from a loaded engine to its first group in a step
LEAVE_S = 15.0
REWARD = """
import time
from pathlib import Path

def score(response, ground_truth):
    time.sleep(float(Path(__file__).with_name("pace").read_text()))
    return float(ground_truth in response)
"""
ENDS = ("leaves", "is preempted", "is killed", "is stopped", "stays")


class Joined:
    """A `coati-rl join`, with a directory for temporary files of its own, as another machine has."""

    def __init__(self, run, port, *, model, cert, token=None, log):
        self.tmp = Path(tempfile.mkdtemp(prefix="join-"))
        self.environment = {**os.environ, "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.log = log
        options = ["--token-file", token or run.run_dir / "join_token", "--model", model, "--ca", cert]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                self._command("join", f"https://127.0.0.1:{port}", *options, "--device", "cpu"),
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.family = [psutil.Process(self.process.pid)]

    def _command(self, *words):
        return [sys.executable, "-m", "coati_rl.command_line", *map(str, words)]

    def text(self):
        return self.log.read_text()

    def number(self):
        """Return its number, and remember its processes."""
        self.family += self.family[0].children(recursive=True)
        return int(self.text().split("joined as producer ")[1].split()[0])

    def worker(self):
        """The process that samples, below the one that watches it."""
        return self.family[0].children()[0]

    def leave(self):
        """`coati-rl leave` on its machine."""
        subprocess.run(self._command("leave"), env=self.environment, check=True, timeout=60)

    def end(self):
        """Kill what is left. Returns: which processes and files were."""
        if self.process.poll() is None:
            self.family += self.family[0].children(recursive=True)
        _, alive = psutil.wait_procs(self.family, timeout=5)
        left = [*alive, *(path for path in self.tmp.rglob("*") if path.name != f"coati-rl-join-{os.getuid()}")]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.tmp, ignore_errors=True)
        return left


def free_port():
    """A port that Ray does not take before the run listens: none of its workers', and none that systems choose."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)  # not the suite's seed, which others have, too
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def set_pace(directory, seconds):
    """How long a response is scored, which makes the run last long enough; the file is whole at any time."""
    new = directory / "pace.new"
    new.write_text(str(seconds))
    new.rename(directory / "pace")


@pytest.fixture
def machines():
    """Joined machines; those that a failing test leaves are ended."""
    made = []
    yield made
    for machine in made:
        machine.end()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate of 127.0.0.1, signed by itself; its key)."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=coati"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_machines_join_leave_are_killed_and_stopped_and_no_prompt_is_lost(
    make_tiny, flags, start_run, certificate, machines, tmp_path, record_property
):
    model, (cert, key), port = make_tiny(tied=True), certificate, free_port()
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    set_pace(tmp_path, 0.1)
    job = [*flags(model, prompts=PER_STEP), "-imbs", 1, "-b", "transformers", "-rt", f"{reward}:score", "-e", PASSES]
    joining = ["--join-port", port, "--join-cert", cert, "--join-key", key, "--heartbeat-timeout-s", SILENT_S]
    run = start_run(*job, "-nb", 1, *joining)
    run.wait_for_step(1)
    set_pace(tmp_path, 0.2)  # a step is short: up to two pass from a loaded engine until its first group is in one
    machines += [Joined(run, port, model=model, cert=cert, log=tmp_path / f"{end}.log") for end in ENDS]
    joined = dict(zip(ENDS, machines, strict=True))
    numbers, waits = first_groups(run, joined)
    record_property("seconds from a loaded engine to its first group in a step", waits)
    assert max(waits.values()) < FIRST_GROUP_S
    set_pace(tmp_path, 0.5)
    assert sorted(numbers.values()) == [1, 2, 3, 4, 5], "each has one number"

    begin = time.monotonic()
    joined["leaves"].leave()
    joined["is preempted"].process.send_signal(signal.SIGTERM)
    for end in ("leaves", "is preempted"):
        assert joined[end].process.wait(LEAVE_S) == 0, joined[end].text()
        assert "has given its prompts back" in joined[end].text()
    record_property("seconds in which two have left", time.monotonic() - begin)
    killed, stopped = joined["is killed"], joined["is stopped"]
    killed.worker().kill()
    stopped.worker().suspend()
    assert killed.process.wait(LEAVE_S) == 1, killed.text()
    for end in ("is killed", "is stopped"):
        run.wait_for_text(f"producer {numbers[end]} lost: ")
    stopped.worker().resume()
    assert stopped.process.wait(LEAVE_S) == 1, stopped.text()
    refused(run, port, machines, tmp_path, model=model, cert=cert, other_model=make_tiny(tied=False))
    assert "this producer is not of the run any more: no request for 1" in stopped.text()
    set_pace(tmp_path, 0)

    records = assert_complete(run, steps=PASSES * NUM_PROMPTS // PER_STEP)
    assert joined["stays"].process.wait(LEAVE_S) == 0 and "the run is over" in joined["stays"].text()
    assert [machine.end() for machine in machines] == [[] for _ in machines]
    text = run.text()
    for end in ("leaves", "is preempted"):
        assert f"producer {numbers[end]} has left: its machine goes" in text
    assert text.count(" lost: ") == 2
    assert all(record["staleness_max"] <= 1 for record in records)
    assert_each_prompt_once(run, numbers)
    assert_syncs_are_proved(run, numbers["stays"])


def first_groups(run, joined):
    """Wait until a group of each is in a step. Returns: their numbers, and the seconds from loaded engine to there."""
    numbers, loaded, waits = {}, {}, {}
    deadline = time.monotonic() + PATIENCE_S
    while len(waits) < len(joined):
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()
        trained = {line["producer"] for line in read_rollouts(run) if line["is_trained"]}
        for end, machine in joined.items():
            assert machine.process.poll() is None, machine.text()
            if "the engine is loaded" in machine.text():
                loaded.setdefault(end, time.monotonic())
            if end not in numbers and "joined as producer " in machine.text():
                numbers[end] = machine.number()
            if numbers.get(end) in trained:
                waits.setdefault(end, time.monotonic() - loaded[end])
        time.sleep(0.1)
    return numbers, waits


def refused(run, port, machines, tmp_path, *, model, cert, other_model):
    """Each is one message and exit code 2, before anything is loaded."""
    wrong = tmp_path / "wrong_token"
    wrong.write_text("f" * 64)
    cases = {
        "has the weights ": {"model": other_model},
        "is no directory here": {"model": tmp_path / "none"},
        "answers hello with status 401: the token is not that of the run": {"model": model, "token": wrong},
        "is the run there, and --ca its certificate's?": {"model": model, "port": free_port()},
    }
    for number, (message, options) in enumerate(cases.items()):
        options = {"port": port, **options}
        machine = Joined(run, options.pop("port"), cert=cert, log=tmp_path / f"refused-{number}.log", **options)
        machines.append(machine)
        assert machine.process.wait(PATIENCE_S) == 2, machine.text()
        (line,) = machine.text().splitlines()
        assert line.startswith("coati-rl join: ") and message in line


def assert_each_prompt_once(run, numbers):
    """Each pass has each prompt once, and no sample is trained twice."""
    trained = [line for line in read_rollouts(run) if line["is_trained"]]
    counts = Counter((line["uid"], line["sample"]) for line in trained)
    assert set(counts.values()) == {1}
    passes = Counter(line["uid"].rsplit(".", 1)[1] for line in trained)
    assert passes == {str(number): NUM_PROMPTS * GROUP_SIZE for number in range(PASSES)}
    assert {line["producer"] for line in trained} == {0, *numbers.values()}


def assert_syncs_are_proved(run, stays):
    """From its first sync to the end: digests are those of the trainers, and what it sampled with are these weights."""
    syncs = lines(run.run_dir / "syncs.jsonl")
    to_it = [sync["step"] for sync in syncs if stays in sync["producers"]]
    assert len(to_it) > 10 and to_it == [*range(to_it[0], syncs[-1]["step"] + 1)], "each version once"
    assert all(sync["digest"] == sync["identity"] and sync["probe_gap_max"] < 1e-5 for sync in syncs)
    sent = {sync["identity"] for sync in syncs}
    sampled = {each for line in read_rollouts(run) if line["producer"] == stays for each in line["weights"]}
    assert sampled and sampled <= sent
