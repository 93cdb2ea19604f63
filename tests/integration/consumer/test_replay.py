"""Test that every layout takes the same steps on recorded rollouts: losses, norms and metrics of one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.consumer.conftest import LAYOUTS, VOCAB_SIZE, reference_of, save_with_reference
from tests.integration.consumer.replay_process import (
    EXECUTION,
    KL_COEFF,
    PROMPTS_PER_STEP,
    REPLAYS,
    SELECTIONS,
    run_replays,
)
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)  # whichever test is first waits for all launches

NUM_STEPS, GROUP_SIZE, TEMPERATURE = 5, 4, 0.9
TOLERANCE = 1e-5
# Every replay in one process, and one in each layout of two; reinforce_pp whitens over copies.
FAST = {
    "dp1": (*REPLAYS, *SELECTIONS),
    "dp2": ("reinforce_pp",),
    "tp2": ("gspo",),
    "pp2": ("selected",),
    "tp2_pp2": (),
    "pp2_dp2": (),
    "fsdp2_dp2": ("selected",),
}

Metrics = dict[tuple[str, str], list[dict[str, Any]]]  # layout and replay to those of each step


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_reference(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def recording(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the start model: real samples with their log-probabilities, and rewards at random."""
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    steps = [[make_group(rng, uid=f"{step}.{index}") for index in range(PROMPTS_PER_STEP)] for step in range(NUM_STEPS)]
    sample_responses(model, [group for step in steps for group in step])
    path = tmp_path_factory.mktemp("recording") / "rollouts.json"
    path.write_text(json.dumps(steps))
    return path


def make_group(rng: np.random.Generator, *, uid: str) -> dict[str, Any]:
    """A prompt, and samples whose tokens are still to be drawn."""
    prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(6, 16))).tolist()  # some are too short to be shared
    samples = [
        {"length": int(rng.integers(2, 25)), "reward": float(rng.integers(0, 2)), "token_ids": [], "logprobs": []}
        for _ in range(GROUP_SIZE)
    ]
    return {"uid": uid, "prompt": prompt, "temperature": TEMPERATURE, "samples": samples}


@torch.no_grad()
def sample_responses(model: Any, groups: list[dict[str, Any]]) -> None:
    """All in one batch, a row each: a token does not see the padding behind it."""
    rows = [(group["prompt"], sample) for group in groups for sample in group["samples"]]
    for number in range(max(sample["length"] for _, sample in rows)):
        due = [(prompt + sample["token_ids"], sample) for prompt, sample in rows if number < sample["length"]]
        width = max(len(ids) for ids, _ in due)
        token_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in due])
        ends = torch.tensor([len(ids) - 1 for ids, _ in due])
        logs = (model(input_ids=token_ids).logits[range(len(due)), ends] / TEMPERATURE).log_softmax(-1)
        for (_, sample), row, token in zip(due, logs, torch.multinomial(logs.exp(), 1)[:, 0].tolist(), strict=True):
            sample["token_ids"].append(token)
            sample["logprobs"].append(float(row[token]))


@pytest.fixture(scope="module")
def metrics(
    request: pytest.FixtureRequest,
    trainers: TrainerServers,
    model_dir: Path,
    recording: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Metrics:
    directory = tmp_path_factory.mktemp("replay")
    everything = (*REPLAYS, *SELECTIONS)
    chosen = {layout: everything if request.config.getoption("--all") else FAST[layout] for layout in EXECUTION}
    due = [(layout, replay) for layout, replays in chosen.items() for replay in replays]
    for world_size in (1, 2, 4):
        replays = [pair for pair in due if LAYOUTS[pair[0]][0] == world_size]
        if replays:
            trainers.launch_and_check(run_replays, directory, model_dir, recording, replays, world_size=world_size)
    return {pair: json.loads((directory / f"{'-'.join(pair)}.json").read_text()) for pair in due}


@pytest.mark.parametrize(
    ("layout", "replay"),
    [
        pytest.param(layout, replay, marks=[] if replay in FAST[layout] else pytest.mark.full)
        for layout in EXECUTION
        for replay in REPLAYS
        if layout != "dp1"
    ],
)
def test_five_steps_have_the_losses_norms_and_metrics_of_one_process(
    metrics: Metrics, layout: str, replay: str
) -> None:
    assert len(metrics[layout, replay]) == len(metrics["dp1", replay]) == NUM_STEPS
    for step, (found, expected) in enumerate(zip(metrics[layout, replay], metrics["dp1", replay], strict=True)):
        known = {name: value for name, value in expected.items() if value is not None and name != "train_s"}
        for name, value in known.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=TOLERANCE), (step, name)
        assert {name for name, value in found.items() if value is not None} == {*known, "train_s"}
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[] if "selected" in FAST[each] else pytest.mark.full) for each in EXECUTION]
)
def test_samples_without_a_gradient_can_be_left_out_in_every_layout(metrics: Metrics, layout: str) -> None:
    steps = list(zip(metrics[layout, "selected"], metrics["dp1", "all_computed"], strict=True))
    for step, (found, expected) in enumerate(steps):
        assert expected["samples_computed"] == PROMPTS_PER_STEP * GROUP_SIZE
        assert found["samples_computed"] < PROMPTS_PER_STEP * GROUP_SIZE, step
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4, abs=TOLERANCE), step
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE, step
    assert steps[1][0]["grad_norm"] == 0
    assert all(expected["grad_norm"] > 100 * TOLERANCE for step, (_, expected) in enumerate(steps) if step != 1)


def test_every_step_is_measured_with_the_weights_that_sampled_the_recording(metrics: Metrics) -> None:
    for replay in REPLAYS:
        steps = metrics["dp1", replay]
        if replay == "updates":  # measured with the first update of each batch
            assert [step["logprob_gap_mean"] is None for step in steps] == [False, False, True, True, False]
            steps = [step for step in steps if step["logprob_gap_mean"] is not None]
        assert all(0 <= step["logprob_gap_mean"] <= step["logprob_gap_max"] < 1e-5 for step in steps), replay
        assert all(step["logprob_gap_tokens"] > 100 for step in steps)
    # They have moved by far more since.
    assert metrics["dp1", "old_policy"][-1]["old_logprob_gap_mean"] > 1e-3


def test_the_recording_is_one_that_could_tell_layouts_apart(metrics: Metrics) -> None:
    steps = metrics["dp1", "grpo"]
    assert all(abs(step["loss"]) > 100 * TOLERANCE for step in steps[1:])  # on-policy, the first one is about zero
    assert steps[0]["logprob_gap_max"] < 1e-5
    assert steps[-1]["clip_fraction"] > 0
    assert steps[-1]["kl_mean"] > 0


def test_the_other_replays_have_what_they_are_about(metrics: Metrics) -> None:
    first, second, third, fourth, fifth = metrics["dp1", "old_policy"]  # the policy of steps 0, 2 and 4 is the old one
    assert all(step["old_logprob_gap_max"] < TOLERANCE for step in (first, second))  # the recording's own policy
    assert all(step["old_logprob_gap_mean"] > 100 * TOLERANCE for step in (third, fourth, fifth))
    assert all(abs(step["ratio_max"] - 1) < TOLERANCE for step in (first, third, fifth))
    assert all(step["ratio_max"] - 1 > 100 * TOLERANCE for step in (second, fourth))
    # The correction is cut off at 0.9 and 1.1, which are 0.1 nats away.
    assert all(step["old_logprob_gap_max"] > 0.11 for step in (third, fourth, fifth))
    assert metrics["dp1", "gspo"][-1]["clip_fraction"] > 0.1
    first, second, again, second_again, fifth = metrics["dp1", "updates"]
    assert all(abs(step["ratio_max"] - 1) < TOLERANCE for step in (first, fifth))
    assert all(step["ratio_max"] - 1 > 100 * TOLERANCE for step in (second, again, second_again))
    assert again["old_logprob_gap_mean"] == first["old_logprob_gap_mean"]
    assert second_again["old_logprob_gap_mean"] == second["old_logprob_gap_mean"]
    assert 0 < metrics["dp1", "skip"][-1]["samples_skipped"] < PROMPTS_PER_STEP * GROUP_SIZE


def test_the_first_step_of_reinforce_pp_is_that_of_numpy_and_plain_transformers(
    metrics: Metrics, model_dir: Path, recording: Path
) -> None:
    """Reward to go with KL in it, whitened over all tokens of the step; on-policy, so that no ratio is clipped."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (model_dir, reference_of(model_dir)))
    samples = [
        (group["prompt"], sample) for group in json.loads(recording.read_text())[0] for sample in group["samples"]
    ]
    advantages, kl, entropies, terms = [], [], [], []
    for prompt, sample in samples:
        with torch.no_grad():
            ref_logprobs, _ = score(reference, prompt, sample["token_ids"])
        kl.append(np.array(sample["logprobs"]) - ref_logprobs.double().numpy())
        advantages.append(sample["reward"] - KL_COEFF * np.cumsum(kl[-1][::-1])[::-1])
    tokens = np.concatenate(advantages)
    for (prompt, sample), values in zip(samples, advantages, strict=True):
        whitened = torch.tensor((values - tokens.mean()) / tokens.std())
        logprobs, entropy = score(policy, prompt, sample["token_ids"])
        ratio = torch.exp(logprobs.double() - torch.tensor(sample["logprobs"]))
        terms.append((-ratio * whitened).mean())
        entropies.append(entropy)
    loss = torch.stack(terms).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    found = metrics["dp1", "reinforce_pp"][0]
    assert found["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
    assert found["kl_mean"] == pytest.approx(np.concatenate(kl).mean(), abs=TOLERANCE)
    assert found["entropy_mean"] == pytest.approx(torch.cat(entropies).mean().item(), abs=TOLERANCE)
    assert found["ratio_max"] == pytest.approx(1, abs=TOLERANCE)
    assert found["clip_fraction"] == 0


def score(model: Any, prompt: list[int], token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[T] log-probabilities and entropies of a response, in nats."""
    logits = model(input_ids=torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logs = logits.log_softmax(dim=-1)
    return logs.gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1), -(logs.exp() * logs).sum(dim=-1)


def test_whitening_over_the_tokens_of_a_rank_alone_is_noticed(
    trainers: TrainerServers, metrics: Metrics, model_dir: Path, recording: Path, tmp_path: Path
) -> None:
    trainers.launch_and_check(
        run_replays, tmp_path, model_dir, recording, [("dp2", "reinforce_pp")], True, world_size=2
    )
    found, right = json.loads((tmp_path / "dp2-reinforce_pp.json").read_text()), metrics["dp1", "reinforce_pp"]
    assert found[0]["kl_mean"] == pytest.approx(right[0]["kl_mean"], abs=TOLERANCE)
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(found, right, strict=True)) > 100 * TOLERANCE
