"""Test on-policy distillation in whole runs: a student comes closer to a teacher of another size."""

import pytest

LEARNS = {
    "backend": "transformers",
    "num_generations": 4,
    "train_microbatch_size": 8,
    "num_episodes": 5,
    "max_new_tokens": 8,
    "learning_rate": 1e-2,
    "kl_coeff": 0,
}


@pytest.fixture(scope="module")
def teacher_dir(tokenizer, tmp_path_factory):
    """A Llama of two layers and width 32 that prefers the first 32 tokens; the student is a Qwen3 of one, width 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0  # what all hidden states have in common,
        model.lm_head.weight[:32] += 0.08  # and these tokens' logits read: the student's are nearly equal
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def kl_of(trace):
    """Mean of the first and of the last four steps, nats per token."""
    values = [step["teacher_kl_mean"] for step in trace.steps]
    return sum(values[:4]) / 4, sum(values[-4:]) / 4


@pytest.mark.parametrize("distill_kl", ["token"])
def test_a_student_comes_closer_to_its_teacher_without_any_reward(run_in_threads, teacher_dir, tmp_path, distill_kl):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"messages": {{"role": "user", "content": "p{i}"}}}}\n' for i in range(8)))
    trace = run_in_threads(
        {
            **LEARNS,
            "dataset": str(questions),  # no answers
            "reward_type": "none",
            "teacher": teacher_dir,
            "distill_only": True,
            "distill_kl": distill_kl,
        },
        score=None,
    )
    first, last = kl_of(trace)

    assert last < 0.8 * first


def test_beside_the_reward_the_teacher_takes_part_and_without_one_the_metric_is_null(run_in_threads, teacher_dir):
    plain = run_in_threads({"max_steps": 1, "kl_coeff": 0})
    assert plain.steps[0]["teacher_kl_mean"] is None
    both = run_in_threads({"max_steps": 1, "kl_coeff": 0, "teacher": teacher_dir})
    assert both.steps[0]["teacher_kl_mean"] is not None
    assert any((both.gradients[0][name] != gradient).any() for name, gradient in plain.gradients[0].items())


def test_alone_rewards_change_no_gradient(run_in_threads, teacher_dir):
    settings = {"max_steps": 1, "kl_coeff": 0, "teacher": teacher_dir, "distill_only": True}
    always = run_in_threads(settings, score=lambda *_: _score(1.0))
    parity = run_in_threads(settings)
    for name, gradient in parity.gradients[0].items():
        assert (gradient == always.gradients[0][name]).all(), name
    assert any(gradient.any() for gradient in parity.gradients[0].values())


def _score(reward):
    from coati_rl.types import Score

    return Score(reward=reward, answer_correct=True, format_valid=True, verdict="ok")
