"""On the same recorded rollouts every layout takes the same steps: losses, norms and metrics of one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.consumer.conftest import LAYOUTS, VOCAB_SIZE, launch_and_check
from tests.integration.consumer.replay_process import EXECUTION, PROMPTS_PER_STEP

NUM_STEPS, GROUP_SIZE, TEMPERATURE = 5, 4, 0.9
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def recording(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the start model: real samples with their log-probabilities, and rewards at random."""
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(models[True]).eval()
    steps = [
        [make_group(model, rng, uid=f"{step}.{index}") for index in range(PROMPTS_PER_STEP)]
        for step in range(NUM_STEPS)
    ]
    path = tmp_path_factory.mktemp("recording") / "rollouts.json"
    path.write_text(json.dumps(steps))
    return path


def make_group(model: Any, rng: np.random.Generator, *, uid: str) -> dict[str, Any]:
    prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(3, 9))).tolist()
    samples = [sample_response(model, rng, prompt, int(rng.integers(2, 25))) for _ in range(GROUP_SIZE)]
    return {"uid": uid, "prompt": prompt, "temperature": TEMPERATURE, "samples": samples}


def sample_response(model: Any, rng: np.random.Generator, prompt: list[int], length: int) -> dict[str, Any]:
    token_ids, logprobs = list(prompt), []
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1] / TEMPERATURE
        token = int(torch.multinomial(logits.softmax(-1), 1))
        logprobs.append(float(logits.log_softmax(-1)[token]))
        token_ids.append(token)
    return {"token_ids": token_ids[len(prompt) :], "logprobs": logprobs, "reward": float(rng.integers(0, 2))}


@pytest.fixture(scope="module")
def metrics(models: dict[bool, Path], recording: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Layout to the metrics of each step."""
    directory = tmp_path_factory.mktemp("replay")
    for world_size in (1, 2, 4):
        layouts = ",".join(layout for layout in EXECUTION if LAYOUTS[layout][0] == world_size)
        launch_and_check("replay_process.py", directory, models[True], recording, layouts, world_size=world_size)
    return {layout: json.loads((directory / f"{layout}.json").read_text()) for layout in EXECUTION}


@pytest.mark.parametrize("layout", [layout for layout in EXECUTION if layout != "dp1"])
def test_five_steps_have_the_losses_norms_and_metrics_of_one_process(metrics: dict[str, Any], layout: str) -> None:
    assert len(metrics[layout]) == len(metrics["dp1"]) == NUM_STEPS
    for step, (found, expected) in enumerate(zip(metrics[layout], metrics["dp1"], strict=True)):
        for name in ("loss", "kl_mean", "entropy_mean", "clip_fraction", "grad_norm", "learning_rate"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=TOLERANCE), (step, name)
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE


def test_the_recording_is_one_that_could_tell_layouts_apart(metrics: dict[str, Any]) -> None:
    steps = metrics["dp1"]
    assert all(abs(step["loss"]) > 100 * TOLERANCE for step in steps[1:])  # on-policy, the first one is about zero
    assert steps[0]["logprob_gap_max"] < 1e-5
    assert steps[-1]["clip_fraction"] > 0
    assert steps[-1]["kl_mean"] > 0
