"""Test runs with a critic as users start them: vLLM and two trainers, a kill, and the same bits after it."""

import json
import subprocess
import sys

import pytest

from tests.integration.runs.conftest import ROOT
from tests.integration.runs.records import assert_complete, lines
from tests.integration.runs.resuming import assert_goes_on_bit_for_bit
from tests.integration.runs.test_offline import tensors

pytestmark = pytest.mark.timeout(900)
LAYOUTS = {
    "dp1": ("-t", 1, "-tbs", 4, "-tMbs", 4),
    "dp2": ("-t", 2, "-tbs", 2, "-tMbs", 2),
    "tp2": ("-t", 2, "-tp", 2, "-tbs", 4, "-tMbs", 4),
    "fsdp2": ("-t", 2, "--plugin", "fsdp2", "-tbs", 2, "-tMbs", 2),
}


def ppo(flags, model, layout):
    return (*flags(model), "-a", "PPO", "-kl", 0.01, *LAYOUTS[layout], "-si", 1, "--max-steps", 4)


@pytest.mark.parametrize("layout", [pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS])
def test_a_killed_run_goes_on_with_both_optimizers(make_tiny, start_run, flags, layout):
    keys = ("value_loss", "explained_variance", "value_grad_norm", "kl_mean")
    whole = assert_goes_on_bit_for_bit(
        start_run, ppo(flags, make_tiny(tied=True), layout), places=(4, "4/value"), keys=keys
    )
    assert len(tensors(whole, "4/value")) == 2


@pytest.mark.full
def test_a_reward_model_is_the_critic_s_start_and_a_wrong_one_is_refused(make_tiny, start_run, flags, tmp_path):
    model = make_tiny(tied=True)
    first = start_run(*ppo(flags, model, "dp1"), "--max-steps", 1)
    assert first.wait() == 0, first.text()
    critic = first.run_dir / "checkpoints" / "step-1" / "value"
    again = start_run(*ppo(flags, model, "dp1"), "--max-steps", 1, "--critic-model", critic, name="again")
    assert again.wait() == 0, again.text()
    (record,) = assert_complete(again, steps=1)
    assert record["value_mean"] != 0
    job = ppo(flags, model, "dp1")
    refused = start_run(*job, "--critic-model", tmp_path / "none", name="refused")
    assert refused.wait() == 2 and "--critic-model" in refused.text().splitlines()[-1]


@pytest.mark.full
def test_the_quickstart_s_task_is_learned(start_run, tmp_path):
    model = tmp_path / "model"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_tiny_model.py", model, "--seed", "0"], check=True, timeout=300
    )
    sizes = ("-t", 2, "-i", 2, "-g", 8, "-ibs", 32, "-imbs", 32, "-tbs", 32, "-tMbs", 32, "-tmbs", 16)
    held_out = ("-ed", json.dumps({"arithmetic": str(model / "eval.jsonl")}), "-ei", 40)
    limits = ("-mnt", 32, "-mpt", 512, "--max-steps", 40, "--seed", 0)
    job = ("-m", model, "-d", model / "train.jsonl", "-rt", "boxed", "-a", "PPO", "-kl", 0, "-lr", 3e-4)
    run = start_run(*job, *sizes, *held_out, *limits, "-b", "vllm")
    assert run.wait() == 0, run.text()
    first, *_, last = (line["accuracy"] for line in lines(run.run_dir / "eval" / "summary.jsonl"))
    assert first < 0.5 and last >= 0.9
    explained = [record["explained_variance"] for record in assert_complete(run, steps=40)]
    assert max(explained) > 0.2
