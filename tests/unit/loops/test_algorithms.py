"""Test algorithms in whole runs: every preset, a user's functions, dynamic sampling, steps without samples."""

import json

import pytest
import torch

from coati_rl.batching.packing import build_mini_batch
from coati_rl.config.presets import PRESETS
from coati_rl.errors import RunError
from coati_rl.types import Score
from coati_rl.work import TrainWork


def score_of_text(response, ground_truth):
    """Right for every second length; the ground truth "always" and "never" decide by themselves."""
    is_right = {"always": True, "never": False}.get(ground_truth, len(response) % 2 == 1)
    return Score(reward=float(is_right), answer_correct=is_right, format_valid=True, verdict="ok")


@pytest.fixture(scope="module")
def half_decided(tmp_path_factory):
    """Sixteen prompts of which eight are trivially right or wrong."""
    path = tmp_path_factory.mktemp("prompts") / "half.jsonl"
    answers = ["always", "maybe", "never", "maybe"] * 4
    rows = [{"messages": {"role": "user", "content": f"p{i}"}, "gt_answer": a} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained_uids(trace):
    """Uids in rollout files, of samples that were trained."""
    lines = [
        line for path in sorted(trace.paths.rollouts.glob("*.jsonl")) for line in path.read_text().split("\n")[:-1]
    ]
    return {record["uid"] for record in map(json.loads, lines) if record["is_trained"]}


# With a critic, a greedy answer, KL in rewards, ratios of samples, soft weights.
FAST = ("GRPO", "PPO", "REMAX", "REINFORCE_PP", "GSPO", "VESPO")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "algo", [algo if algo in FAST else pytest.param(algo, marks=pytest.mark.full) for algo in PRESETS]
)
def test_every_preset_trains_from_start_to_end(run_in_threads, algo):
    trace = run_in_threads({"algo": algo, "num_episodes": 4, "max_steps": 3})
    assert len(trace.steps) == 3
    assert all(step["grad_norm"] > 0 for step in trace.steps[:1])
    assert all(step["loss"] is not None for step in trace.steps)


def test_one_sample_a_prompt_is_enough_for_an_algorithm_without_groups(run_in_threads):
    trace = run_in_threads({"algo": "REINFORCE_PP", "num_generations": 1, "train_microbatch_size": 2, "max_steps": 2})
    assert [step["samples_in_loss"] for step in trace.steps] == [2, 2]
    assert trace.steps[0]["grad_norm"] > 0


def test_dapo_replaces_filtered_groups_and_every_counter_adds_up(run_in_threads, half_decided):
    # Eight samples, so that hardly any "maybe" group is all right or all wrong.
    settings = {"algo": "DAPO", "dataset": half_decided, "num_generations": 8, "num_episodes": 2, "kl_coeff": 0}
    trace = run_in_threads({**settings, "filter_truncated_response": False}, score=score_of_text)
    assert len(trace.steps) >= 6
    per_step = 2  # tbs * dp
    for step in trace.steps:
        assert step["samples_in_loss"] == per_step * 8
    total = sum(step["groups_total"] for step in trace.steps)
    filtered = sum(step["groups_filtered"] for step in trace.steps)
    (finished,) = trace.of("finished")
    assert total - filtered == len(trace.steps) * per_step
    assert total + finished["groups_filtered"] + finished["groups_dropped"] == 16 * 2
    assert finished["groups_dropped"] < per_step
    uids = [group.prompt.uid for group in trace.groups]
    assert len(uids) == len(set(uids)) == 16 * 2  # each prompt once an episode, none twice
    assert len(trained_uids(trace)) == len(trace.steps) * per_step
    assert filtered > 0


def test_max_empty_batches__ends_a_run_that_learns_nothing_with_the_reason(run_in_threads, write_prompts):
    def always_right(response, ground_truth):
        return Score(reward=1.0, answer_correct=True, format_valid=True, verdict="ok")

    settings = {"algo": "DAPO", "dataset": write_prompts("easy", 40), "max_empty_batches": 3}
    with pytest.raises(RunError, match=r"\d+ groups in a row, 3 optimizer") as caught:
        run_in_threads({**settings, "filter_truncated_response": False}, score=always_right)
    assert "always right" in str(caught.value)
    assert "--max-empty-batches" in str(caught.value)


@pytest.mark.full
def test_optimizer__is_the_users_own_and_so_is_the_schedule(run_in_threads, tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def sgd(parameters, *, lr):\n    return torch.optim.SGD(parameters, lr=lr)\n"
        "def squared(progress):\n    return (1 - progress) ** 2\n"
    )
    own = {"optimizer": f"{tmp_path}/own.py:sgd", "lr_schedule": f"{tmp_path}/own.py:squared"}
    plain, trace = run_in_threads({"max_grad_norm": 1e9}), run_in_threads({"max_grad_norm": 1e9, **own})
    assert [step["learning_rate"] for step in trace.steps] == [1e-3 * (1 - done / 4) ** 2 for done in range(4)]
    name = "model.norm.weight"
    gradients = sum(rate["learning_rate"] * each[name] for rate, each in zip(trace.steps, trace.gradients, strict=True))
    torch.testing.assert_close(trace.weights[name], torch.ones_like(gradients) - gradients, rtol=0, atol=1e-6)
    assert not torch.equal(plain.weights[name], trace.weights[name])


def test_a_step_without_samples_changes_no_weight_and_is_counted(run_in_threads):
    def always_wrong(response, ground_truth):
        return Score(reward=0.0, answer_correct=False, format_valid=True, verdict="wrong")

    trace = run_in_threads({"filter_range": (0.01, 0.99), "weight_decay": 0.5}, score=always_wrong)
    assert [step["samples_in_loss"] for step in trace.steps] == [0] * 4
    assert [step["loss"] for step in trace.steps] == [None] * 4
    assert [step["groups_filtered"] for step in trace.steps] == [2] * 4
    assert trace.gradients == []  # no optimizer step was taken


def test_a_users_own_loss_and_advantage_take_part(run_in_threads, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def terms(logprobs, old_logprobs, advantages, micro_batch):\n"
        "    return -logprobs * advantages\n"
        "def advantage(rewards):\n"
        "    return 0 * rewards\n"
    )
    own_terms = run_in_threads({"policy_loss": f"{path}:terms", "max_steps": 1, "kl_coeff": 0})
    assert own_terms.steps[0]["grad_norm"] > 0 and own_terms.steps[0]["clip_fraction"] == 0
    nothing = run_in_threads({"advantage_estimator": f"{path}:advantage", "max_steps": 1, "kl_coeff": 0})
    assert nothing.steps[0]["grad_norm"] == 0


def test_recomputed_old_logprobs_clip_the_second_step_of_a_sync_period(run_in_threads):
    # K = 2: against its own weights every step would have ratio 1, and no step would be clipped.
    settings = {"old_logprobs": "trainer", "clip_eps_low": 0.0, "clip_eps_high": 0.0, "learning_rate": 1e-2}
    first, second, third, fourth = run_in_threads(settings).steps
    assert first["ratio_max"] == third["ratio_max"] == 1.0
    assert second["ratio_max"] > 1.0 and second["clip_fraction"] > 0
    assert fourth["ratio_max"] > 1.0 and fourth["clip_fraction"] > 0
    assert first["old_logprob_gap_mean"] > 0


def test_shared_prefix__computes_fewer_tokens_and_takes_the_same_steps(run_in_threads):
    shared, own = (run_in_threads({"shared_prefix": value, "max_steps": 2}) for value in (True, False))
    assert shared.responses == own.responses
    for name, gradient in own.gradients[0].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(shared.gradients[0][name], gradient, rtol=0, atol=1e-5 * scale)
    for one, other in zip(shared.steps, own.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["logprob_gap_tokens"] == other["logprob_gap_tokens"], "tokens of the loss count for each sample"

    def num_tokens(trace):
        batches = [build_mini_batch(work.batch) for work in trace.work if isinstance(work, TrainWork)]
        return [sum(m.num_tokens for m in batch.micro_batches) for batch in batches]

    # Of each of two prompts of 10 bytes or more, once less.
    for fewer, all_tokens in zip(num_tokens(shared), num_tokens(own), strict=True):
        assert fewer <= all_tokens - 2 * 10
