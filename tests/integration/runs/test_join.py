"""Test producers that join a run with their node and leave it: none of the run's prompts is lost."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.integration.runs.records import read_rollouts
from tests.integration.runs.two_nodes import ADDRESSES, TwoNodes

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

STAYS_S = float(os.environ.get("JOIN_STAYS_S", 10))  # for which a node stays, and stays away
CYCLES = int(os.environ.get("JOIN_CYCLES", 2))


@pytest.fixture(scope="module")
def nodes():
    """A head with room for one trainer and one producer."""
    world = TwoNodes(2)
    yield world
    world.end()


def join(nodes, log):
    command = [sys.executable, "-m", "coati_rl.command_line", "join", f"{ADDRESSES[0]}:6379"]
    options = ["--num-cpus=1", "--num-gpus=0", f"--node-ip-address={ADDRESSES[1]}"]
    with log.open("a") as file:
        return subprocess.Popen(
            [*nodes.enter(1), *command, *options], env=nodes.environment, stdout=file, stderr=subprocess.STDOUT
        )


def preempt(joined):
    """SIGTERM, as a cluster sends it; nsenter passes no signals on."""
    for process in psutil.Process(joined.pid).children():
        process.terminate()


def test_producers_join_and_leave_with_their_node_and_no_prompt_is_lost(nodes, make_tiny, flags, tmp_path):
    job = flags(make_tiny(tied=True), trainers=1, inferencers=1)
    run = nodes.run(
        [*job, "-b", "transformers", "-nb", 1, "-e", 1000, "--max-steps", 100_000, "--max-producers", 2],
        tmp_path / "run",
    )
    run.wait_for_step(2)
    try:
        for cycle in range(1, CYCLES + 1):
            joined = join(nodes, tmp_path / "join.log")
            run.wait_for_text(f"\nproducer {cycle} has joined")
            time.sleep(STAYS_S)
            preempt(joined)
            assert joined.wait(60) == 0, (tmp_path / "join.log").read_text()
            run.wait_for_text(f"\nproducer {cycle} has left: its node goes", timeout_s=60)
            time.sleep(STAYS_S)
    finally:
        run.interrupt()
    assert run.wait(120) == 130, run.text()
    assert " lost: " not in run.text()
    lines = [line for line in read_rollouts(run) if line["is_trained"]]
    by_producer = {number: sum(line["producer"] == number for line in lines) for number in range(CYCLES + 1)}
    assert all(by_producer.values()), by_producer
    steps = [record["step"] for record in run.records()]
    assert steps == [*range(1, len(steps) + 1)]
    assert len({(line["uid"], line["sample"]) for line in lines}) == len(lines), "each once"
    prompts = {line["uid"] for line in lines}
    first_pass = {uid for uid in prompts if uid.endswith(".0")}
    assert len(steps) * 4 < 160 or len(first_pass) == 160, "every prompt of a pass that is over"
    assert run.actors() == []
