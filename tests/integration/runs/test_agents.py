"""A real run of episodes of several turns with vLLM, whose producer is killed in the middle of one."""

import pytest

from tests.integration.runs.records import assert_complete, assert_engine_and_trainer_agree, read_rollouts

ENVIRONMENT = '''
import os, subprocess, time
from pathlib import Path

HERE = Path(__file__).parent


class Asks:
    """Ask three times; the first episode that gets to its second turn waits for a file, with a process of its own."""

    def reset(self, task):
        os.chdir("/")

    def step(self, action):
        if action.turn == 1 and not (HERE / "go").exists():
            subprocess.Popen(["sleep", "3127"])
            (HERE / "waits").touch()
            while not (HERE / "go").exists():
                time.sleep(0.05)
        reward = float("2" in action.text)
        return [{"role": "user", "content": "And once more?"}], reward, action.turn == 2, {"turn": action.turn}
'''


@pytest.mark.full
def test_a_producer_that_is_killed_in_mid_episode_is_replaced_and_every_prompt_is_trained_once(
    make_tiny, start_run, flags, tmp_path
):
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    environment = ["--env", f"{tmp_path}/asks.py:Asks", "--env-isolation", "process", "--max-turns", 4]
    sizes = ["-mpt", 128, "--max-episode-tokens", 320, "--max-steps", 2]
    run = start_run(*flags(make_tiny(tied=True)), "-rt", "env", *environment, *sizes)
    run.wait_until((tmp_path / "waits").exists)
    (victim,) = run.processes("ray::ProducerActor")
    assert run.processes("episode_process") and run.processes("sleep 3127")
    victim.kill()
    (tmp_path / "go").touch()
    records = assert_complete(run, steps=2)
    assert_engine_and_trainer_agree(records)
    assert "producer 0 lost" in run.text()
    assert all(record["turns_mean"] == 3.0 and record["samples_invalid"] == 0 for record in records)
    lines = read_rollouts(run)
    assert len(lines) == len({(line["uid"], line["sample"]) for line in lines}), "each trajectory once"
    last = {(line["uid"], line["episode"]): line for line in lines}  # the line of an episode's last trajectory
    assert len(last) == 2 * 4 * 4
    assert {line["environment"]["ended"] for line in last.values()} == {"done"}
    paid = dict.fromkeys(last, 0.0)
    for line in lines:
        paid[line["uid"], line["episode"]] += sum(value for _, _, value in line.get("token_rewards", ()))
    assert paid == {episode: line["reward"] for episode, line in last.items()}
    assert len(set(paid.values())) > 1
    assert run.left_over() == []
