"""Test on-policy distillation in whole runs: a student comes closer to a teacher of another size."""

from dataclasses import replace

import pytest

from coati_rl.types import Score

LEARNS = {
    "backend": "transformers",
    "num_generations": 8,
    "train_microbatch_size": 16,
    "num_episodes": 2,
    "max_new_tokens": 8,
    "learning_rate": 1e-2,
    "kl_coeff": 0,
}


def kl_of(trace):
    """Mean of the first and of the last three steps, nats per token."""
    values = [step["teacher_kl_mean"] for step in trace.steps]
    return sum(values[:3]) / 3, sum(values[-3:]) / 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("distill_kl", ["token", "full"])
def test_a_student_comes_closer_to_its_teacher_without_any_reward(run_in_threads, teacher_dir, tmp_path, distill_kl):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"messages": {{"role": "user", "content": "p{i}"}}}}\n' for i in range(8)))
    settings = {"dataset": str(questions), "reward_type": "none", "teacher": teacher_dir, "distill_only": True}
    first, last = kl_of(run_in_threads({**LEARNS, **settings, "distill_kl": distill_kl}, score=None))
    assert last < 0.75 * first


@pytest.mark.full
def test_alone_rewards_change_no_gradient_and_without_a_teacher_the_metric_is_null(run_in_threads, teacher_dir):
    def run(reward=1.0, **settings):
        score = Score(reward=reward, answer_correct=True, format_valid=True, verdict="ok")
        varied = iter(range(1000))
        scores = (lambda *_: replace(score, reward=float(next(varied) % 2))) if reward is None else (lambda *_: score)
        return run_in_threads({"max_steps": 1, "kl_coeff": 0, **settings}, score=scores)

    alone = {"teacher": teacher_dir, "distill_only": True}
    equal, varied = run(**alone), run(reward=None, **alone)
    for name, gradient in equal.gradients[0].items():
        assert (gradient == varied.gradients[0][name]).all(), name
    assert any(gradient.any() for gradient in equal.gradients[0].values())
    plain = run()
    assert plain.steps[0]["teacher_kl_mean"] is None
    assert not any(gradient.any() for gradient in plain.gradients[0].values())  # all rewards are equal
