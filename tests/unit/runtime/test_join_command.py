"""Test whom `coati-rl leave` signals: real processes, each with its note."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from coati.join import main as join_over_https
from coati_rl.runtime.join_command import join as join_cluster
from coati_rl.runtime.join_command import leave

# Be a `coati-rl join` that has started a process of its own, and say that one's number.
JOIN = """
import os, time
from coati_rl.runtime.join_command import joined_here, leaving
with leaving() as is_leaving, joined_here():
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    while not is_leaving():
        time.sleep(0.01)
    os.kill(child, 9)
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / f"coati-rl-join-{os.getuid()}"
    directory.mkdir()
    return directory


@pytest.fixture
def join(notes):
    """Start one. Returns: the process, and the number of the one that it has started."""
    environment, processes = {**os.environ, "TMPDIR": str(notes.parent)}, []

    def start():
        process = subprocess.Popen([sys.executable, "-c", JOIN], env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_whoever_has_joined_leaves(notes, join):
    process, _ = join()
    assert [note.name for note in notes.iterdir()] == [str(process.pid)]
    assert leave(["--grace-s", "30"]) == 0
    assert process.wait(60) == 0
    assert not [*notes.iterdir()] and leave([]) == 2


def test_leave_refuses_the_notes_of_another_user_in_one_message(notes, monkeypatch, capsys):
    other = notes.with_name("coati-rl-join-4242")
    other.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert leave([]) == 2
    assert capsys.readouterr().err == (
        f"coati-rl: {other}: belongs to another user; set TMPDIR to a directory of your own\n"
    )


def test_a_process_that_has_the_number_of_a_killed_join_is_left_alone(notes, join):
    other = subprocess.Popen(["sleep", "60"])
    killed, child = join()
    try:
        killed.kill()
        killed.wait()
        (notes / str(killed.pid)).rename(notes / str(other.pid))  # as if it had got that number
        assert leave([]) == 2, "though a process that the killed one has started is alive"
        assert other.poll() is None
    finally:
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.wait()


@pytest.mark.parametrize("command", [join_cluster, leave, join_over_https], ids=["join", "leave", "join over HTTPS"])
def test_without_a_directory_for_the_notes_one_message_has_the_remedy(monkeypatch, capsys, command):
    arguments = [] if command is leave else ["https://127.0.0.1:1" if command is join_over_https else "127.0.0.1:1"]
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert command(arguments) == 2
    assert capsys.readouterr().err.split(": ", 1)[1] == (
        f"TMPDIR: /dev/null/coati-rl-join-{os.getuid()}: Not a directory; set it to a directory with free space that "
        "you may write to\n"
    )


# Be one whose node is a program that stays until SIGTERM, and say that one's number when it runs.
NODE = """
import argparse, sys, time
from pathlib import Path
from coati_rl.runtime import join_command
join_command._RAY = Path(sys.argv[1])
options = argparse.Namespace(address="a:1", num_cpus=None, num_gpus=None, node_ip_address=None)
with join_command._node(options) as node:
    print(node.pid, flush=True)
    time.sleep(60)
"""


def test_the_node_of_a_killed_join_ends(tmp_path):
    node = tmp_path / "ray"
    node.write_text(f"#!/bin/sh\ntouch {tmp_path}/runs\nexec sleep 60\n")
    node.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", NODE, node], stdout=subprocess.PIPE, text=True) as join:
        process = psutil.Process(int(join.stdout.readline()))
        end = time.monotonic() + 60
        while not (tmp_path / "runs").exists():
            assert time.monotonic() < end and process.is_running()
            time.sleep(0.02)
        join.kill()
    assert psutil.wait_procs([process], timeout=30)[1] == []
